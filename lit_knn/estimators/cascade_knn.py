"""The cascade estimator: few components of all images choose candidates, more components of these choose images."""

import math
import threading
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from lit_knn.estimators.base import Holdings
from lit_knn.estimators.cascade_draws import CascadeDraws, CoarseEffect
from lit_knn.estimators.counts import COMPONENTS, IMAGES, Count
from lit_knn.estimators.drawn_images import DrawnImages
from lit_knn.estimators.subspace_knn import LEAST_NOISE, NEGLIGIBLE_SHARE, TINY, SubspaceDraws, SubspaceKNN
from lit_knn.linalg.pca import Projection
from lit_knn.reference import Reference
from lit_knn.reference.streaming import GPU_FACTOR
from lit_knn.reference.tiles import Coarse, tiles_of, tiling
from lit_knn.theory.blocked_draws import BLOCK, BlockedDraws, blocked_draws, tiled_mass
from lit_knn.theory.stratified import stratified_draws

DEFAULT_COARSE, DEFAULT_CANDIDATES = 128, 4096
# Bytes of the candidates' probabilities in all tiles. Small pieces would read all coordinates too often.
MASS_BYTES = 256 * 2**20
# Bytes of candidates' coordinates that are gathered at a time on a CPU, so that they stay in its cache.
CANDIDATE_BYTES = 2 * 2**20
# A choice of components is enough if the logarithm of posterior over proposal has at most this variance, 2·V/t², where
# V is the variance of the images outside them.
ENOUGH = 1.0
# The coarse stage has a control variate if its rest has at least this share. The mean of the rest is a difference of
# two means, and for a small rest it would be rounded.
LEAST_REST = 1e-3


class CascadeKNN(SubspaceKNN):
    """`SubspaceKNN` for large sets: a coarse stage chooses the candidates among which it draws.

    The posterior of all images given their first few principal components is the mean of the posterior given more of
    them. So optimal resampling represents the coarse posterior by a few thousand weighted candidates. Only these are
    scored in all r components, and n of them are kept or drawn by the same rule. Exact likelihoods of the n images
    over what they were drawn from are the weights. At both stages a control variate subtracts the known effect of the
    drawing on the mean of y. `docs/cascade_knn.md` derives the estimator and its error.

    The sampled parts are biased, O(1/n) and O(1/candidates), and consistent. Without more images than candidates, this
    is `SubspaceKNN`.

    Args:
        r: principal components of the candidates; null for 512, or min(N, d) if that is less.
        n: most images gathered per z; null for 256, or N if that is less.
        coarse: principal components of all images; null for 128, or min(N, d) if that is less; at most r.
        candidates: most candidates per z; null for 4,096, or N if that is less.

    Raises:
        InputError: a number < 1; at `bind`, r or coarse > min(N, d), or n or candidates > N.
    """

    coarse = Count(DEFAULT_COARSE, COMPONENTS)
    candidates = Count(DEFAULT_CANDIDATES, IMAGES)

    def __init__(
        self, r: int | None = None, n: int | None = None, coarse: int | None = None, candidates: int | None = None
    ) -> None:
        super().__init__(r, None, n)
        self.coarse, self.candidates = coarse, candidates

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Projects the images."""
        super().bind(reference)
        if not self._single_stage():
            self._coarse()
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator also holds the first coordinates of all images in float32."""
        fine = super().holds(N, d, pixels, device)
        coarse = CascadeKNN.coarse.within(self, N, d)
        if CascadeKNN.candidates.within(self, N, d) >= N:
            return fine
        T, c = tiling(N)
        work = 0 if device.type == "cuda" else 4 * T * c * _rows_of_piece(T * c, device)
        tiles = {f"r={coarse} coordinates in tiles": 4 * T * c * (coarse + 2), "probabilities of tiles": work}
        return Holdings(arrays={**fine.arrays, **tiles})

    def _single_stage(self) -> bool:
        return self.candidates >= self.reference.N

    def _coarse(self) -> Coarse:
        projection, r = self._projection(), min(self.coarse, self.r)
        return self.reference.cached(("tiles", self.r, r), lambda: tiles_of(projection, r))

    def _draw(
        self, z: Tensor, t: Tensor, generator: torch.Generator | None, negligible_share: float = NEGLIGIBLE_SHARE
    ) -> SubspaceDraws:
        if self._single_stage():
            return super()._draw(z, t, generator, negligible_share)
        projection, coarse = self._projection(), self._coarse()
        y = projection.components.project(z)
        log_share = math.log(negligible_share) if negligible_share > 0 else -math.inf
        enough = 2 * coarse.outside[0] <= ENOUGH * t.square()
        pieces: list[tuple[SubspaceDraws, CoarseEffect]] = []
        order = []
        for all_components, rows in _groups(enough, _rows_of_piece(coarse.tiles[:, 0].numel(), y.device)):
            part = projection, coarse, y[rows], t[rows], all_components, log_share, generator
            pieces.append(self._draw_piece(*part))
            order.append(rows)
        position = torch.cat(order).argsort()
        draws, effects = (
            [torch.cat(part)[position] for part in zip(*parts, strict=True)] for parts in zip(*pieces, strict=True)
        )
        return CascadeDraws.of(SubspaceDraws(*draws), CoarseEffect(*effects))

    def _draw_piece(
        self,
        projection: Projection,
        coarse: Coarse,
        y: Tensor,
        t: Tensor,
        all_components: bool,
        log_share: float,
        generator: torch.Generator | None,
    ) -> tuple[SubspaceDraws, CoarseEffect]:
        """Choose the images of some rows: candidates first, then n of them."""
        first, coarse_mean = self._candidates(coarse, y, t, all_components, log_share, generator)
        used = first.kept | first.sampled
        ids = first.ids.where(used, first.ids[:, :1])
        log_q, drawn_mean, square = self._score(projection, y, t, ids, first.sampled, coarse_mean.shape[1])
        log_w = (log_q + first.log_correction).float()
        share = (torch.softmax(log_w.double(), 1) * first.sampled).sum(1)
        norm = y.norm(dim=1) * self._largest_norm(projection)
        rounding = torch.finfo(torch.float32).eps * (norm / t.square()).double()
        draws = stratified_draws(log_w, self.n, log_share - 2 * rounding, None, generator)
        chosen = draws.ids
        inclusion = (-draws.log_correction).exp().where(draws.sampled, 1.0).clamp(max=1.0)
        number = first.sampled.sum(1)
        # Without candidates by chance, and for a small rest, there is no control variate.
        low = 2 * coarse.outside[all_components] <= ENOUGH * t.square()
        controlled = (low & (first.rest >= LEAST_REST) & (number > 0)).unsqueeze(1)
        missing = (0, self.r - coarse_mean.shape[1])
        excess = torch.where(controlled, share.float().unsqueeze(1) * (drawn_mean - coarse_mean), 0.0)
        spread = square - 2 * (drawn_mean * coarse_mean).sum(1) + coarse_mean.square().sum(1)
        rest = draws.rest / draws.rest.sum(1, keepdim=True).clamp_(min=TINY)
        log_correction = draws.log_correction + first.log_correction.gather(1, chosen)
        rest_mean = _weighted_sum(projection.coordinates, ids, rest)
        return SubspaceDraws(ids.gather(1, chosen), log_correction, draws.sampled, draws.used, rest_mean), CoarseEffect(
            # Unused places have no weight, and their distances may be infinite.
            first.sampled.gather(1, chosen) & (log_correction > -math.inf),
            inclusion,
            number,
            share,
            pad(coarse_mean, missing),
            pad(excess, missing),
            spread.double().where(controlled.squeeze(1), 0.0),
        )

    def _work(self, size: int) -> Tensor:
        """Return a work array, on a CPU always the same in each thread: new memory takes longer to get than to fill."""
        tiles = self._coarse().tiles
        if tiles.is_cuda:
            return torch.empty(size, device=tiles.device)
        T, _, c = tiles.shape
        own = self.reference.cached("work arrays", threading.local)
        if not hasattr(own, "mass"):
            own.mass = torch.empty(T * c * _rows_of_piece(T * c, tiles.device))
        return own.mass[:size]

    def _candidates(
        self,
        coarse: Coarse,
        y: Tensor,
        t: Tensor,
        all_components: bool,
        log_share: float,
        generator: torch.Generator | None,
    ) -> tuple[BlockedDraws, Tensor]:
        """Choose candidates from the posterior given the first components, and compute the exact mean over its rest."""
        T, _, c = coarse.tiles.shape
        # Largest rounding error of a squared distance. With this variance at least, it changes no probability much.
        least = torch.finfo(torch.float32).eps * y.norm(dim=1).double() * coarse.largest
        noise = torch.maximum(t.square(), least).clamp_(min=LEAST_NOISE).unsqueeze(1).float()
        query = coarse.query(y, noise, all_components)
        tiles = coarse.tiles[:, : query.shape[1]]
        work = self._work(T * len(y) * c).view(T, len(y), c)
        tiled = tiled_mass(lambda i, part: torch.mm(query, tiles[i], out=part), work)
        along = torch.zeros(len(y), coarse.leading, dtype=torch.float64, device=y.device)
        low = 2 * coarse.outside[all_components] <= ENOUGH * t.square()
        if low.is_cuda or low.any():
            for part, tile, scale in zip(tiled.mass, tiles, tiled.scale, strict=True):
                along += (part @ tile[: coarse.leading].T) * scale.unsqueeze(1)
        keep = min(2 * self.n, self.candidates // 2, T * c // BLOCK)
        log_negligible = log_share - 2 * least / noise.squeeze(1)
        draws = blocked_draws(tiled, keep, self.candidates - keep, log_negligible, generator)
        total = draws.total.unsqueeze(1)
        share_of_kept = torch.where(draws.kept, draws.mass / total, 0.0)[:, :keep].float()
        ids = draws.ids[:, :keep].where(draws.kept[:, :keep], 0)
        of_kept = _weighted_sum(self._projection().coordinates, ids, share_of_kept)[:, : coarse.leading]
        rest = draws.rest.clamp(min=LEAST_REST).unsqueeze(1)
        return draws, ((along / total - of_kept) / rest).float()

    def _score(
        self, projection: Projection, y: Tensor, t: Tensor, ids: Tensor, by_chance: Tensor, controlled: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score candidates in all r components.

        Returns:
            log q up to a constant per row (b, p) float64. Over candidates by chance: the mean of the first components
            (b, controlled), and the mean of their squared norm (b,).
        """
        b, p = ids.shape
        product = y.new_empty(b, p)
        mean, square = y.new_zeros(b, controlled), y.new_zeros(b)
        weights = by_chance / by_chance.sum(1, keepdim=True).clamp(min=1)
        for rows, places, own in _gathered(projection.coordinates, ids):
            product[rows, places] = torch.bmm(own, y[rows].unsqueeze(2)).squeeze(2)
            first, weight = own[..., :controlled], weights[rows, places]
            mean[rows] += torch.bmm(weight.unsqueeze(1), first).squeeze(1)
            square[rows] += (weight * first.square().sum(2)).sum(1)
        log_q = product.double() - projection.half_sq_norms[ids]
        return log_q / t.square().clamp(min=LEAST_NOISE).unsqueeze(1), mean, square

    def _excess(self, weights: Tensor, draws: SubspaceDraws) -> Tensor:
        last = super()._excess(weights, draws)
        return last + draws.coarse.excess if isinstance(draws, CascadeDraws) else last

    def _sq_error(
        self, weights: Tensor, images: DrawnImages, mean: Tensor, excess: Tensor, draws: SubspaceDraws
    ) -> Tensor:
        """Estimate the squared error per dimension, (b,), float64: the sum of the variances of both stages."""
        if not isinstance(draws, CascadeDraws):
            return super()._sq_error(weights, images, mean, excess, draws)
        of_coarse = self._projection().components.expand(draws.coarse.excess).view_as(excess)
        last = super()._sq_error(weights, images, mean, excess - of_coarse, draws)
        return last + self._coarse_sq_error(weights, images, mean, of_coarse, draws.ids, draws.coarse)

    def _coarse_sq_error(
        self, weights: Tensor, images: DrawnImages, mean: Tensor, excess: Tensor, ids: Tensor, coarse: CoarseEffect
    ) -> Tensor:
        """Estimate the coarse stage's variance from those of its candidates that are among the n images.

        A candidate by chance contributes c = w(x − μ̂) − π/s·P(y − E_q[y]). A sum over candidates is estimated by the
        sum over the images, each divided by the probability of its inclusion; the image's weight is w over it.
        """
        projection, count = self._projection(), coarse.number
        weights = torch.where(coarse.by_chance, weights, 0.0)
        leading = self._coarse().leading
        along = projection.coordinates[ids][..., :leading].float()
        centre = projection.components.project(mean)[:, :leading].unsqueeze(1)
        offset = along - coarse.mean[:, :leading].unsqueeze(1)
        cross = torch.where(coarse.by_chance, ((along - centre) * offset).sum(2), 0.0)
        sq_dist = torch.where(coarse.by_chance, images.sq_dist(mean), 0.0)
        has_control = coarse.spread > 0
        share = torch.where(has_control, coarse.share, 0.0) / count.clamp(min=1)
        squares = (weights.square() * coarse.inclusion * sq_dist - 2 * weights * share.unsqueeze(1) * cross).sum(1)
        squares = squares + count * share.square() * coarse.spread
        total = (images.deviation(weights, mean) - excess).flatten(1)
        centred = squares - total.double().square().sum(1) / count.clamp(min=1)
        variance = torch.where(count > 1, centred * count / (count - 1).clamp(min=1), squares).clamp(min=0)
        return variance / self.reference.d


def _groups(enough: Tensor, size: int) -> Iterator[tuple[bool, Tensor]]:
    """Yield groups of at most `size` rows, (b,), and whether they need all coarse components, not only the leading."""
    if enough.is_cuda:
        # The levels of the rows are not known to the host, and all components are right at every level.
        for rows in torch.arange(len(enough), device=enough.device).split(size):
            yield True, rows
        return
    for all_components, level in ((False, enough), (True, ~enough)):
        for rows in level.nonzero().flatten().split(size):
            if len(rows):
                yield all_components, rows


def _gathered(coordinates: Tensor, ids: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield rows, places and the coordinates of their ids, (rows, places, r) float32, in bounded memory."""
    p, r = ids.shape[1], coordinates.shape[1]
    budget = CANDIDATE_BYTES * (1 if ids.device.type == "cpu" else GPU_FACTOR) // (4 * r)
    rows, places = max(budget // p, 1), max(min(budget, p), 1)
    for row in range(0, len(ids), rows):
        for place in range(0, p, places):
            part = ids[row : row + rows, place : place + places]
            # Bags of one image: unlike `index_select`, this reads ahead, and scattered rows are slow to come.
            own = embedding_bag(part.reshape(-1, 1), coordinates, mode="sum").float()
            yield slice(row, row + rows), slice(place, place + places), own.view(*part.shape, r)


def _weighted_sum(coordinates: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Sum the coordinates of each row's ids (b, p) with weights (b, p): (b, r), float32."""
    return embedding_bag(ids, coordinates, mode="sum", per_sample_weights=weights.to(coordinates.dtype)).float()


def _rows_of_piece(images: int, device: torch.device) -> int:
    """Return how many latents' probabilities are held at a time."""
    return max(MASS_BYTES * (1 if device.type == "cpu" else GPU_FACTOR) // (4 * images), 1)
