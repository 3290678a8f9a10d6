"""The subspace estimator: the leading principal components of all images give the proposal and a correction."""

import math
from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Holdings
from lit_knn.estimators.counts import COMPONENTS, DEFAULT_N, DEFAULT_R, IMAGES, Count, check_count
from lit_knn.estimators.drawn_images import DrawnImages
from lit_knn.estimators.sampled import Certificate, CertifiedEstimator, drawn_images, in_order, weight_spread
from lit_knn.linalg.dtypes import check_compute, compute_dtype, matmul_float32, planned_dtype
from lit_knn.linalg.pca import Projection
from lit_knn.reference import Reference
from lit_knn.reference.components import projection_of
from lit_knn.reference.gathered import fuses
from lit_knn.reference.streaming import work_bytes
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.stratified import StratifiedDraws, stratified_draws
from lit_knn.theory.warp import Warp

# Images that together have less than this share of the proposal are left out. They hold the same share of the posterior
# on average. The squared error of leaving them out is at most this share times a squared distance in the data.
NEGLIGIBLE_SHARE = 1e-8
# Minimum number of latents per piece. With fewer, reading the coordinates takes longer than multiplying them.
MIN_ROWS = 32
# Minimum noise variance of the proposal. With a smaller variance, float32 could not hold the logarithms.
LEAST_NOISE = 1e-30
# This divisor replaces 0 where the numerator is 0 too. A smaller one would be rounded to 0 on some processors.
TINY = torch.finfo(torch.float32).tiny


class SubspaceDraws(NamedTuple):
    """`StratifiedDraws` with `rest_mean` (B, r), the exact E_q[y] over the rest, in place of `rest`."""

    ids: Tensor
    log_correction: Tensor
    sampled: Tensor
    used: Tensor
    rest_mean: Tensor

    def rows(self, rows: Tensor | slice, places: int) -> "SubspaceDraws":
        """Select some rows and their first places."""
        ids, log_correction, sampled = (part[rows, :places] for part in self[:3])
        return SubspaceDraws(ids, log_correction, sampled, self.used[rows], self.rest_mean[rows])


class SubspaceKNN(CertifiedEstimator):
    """SNIS (Eq. 11) whose proposal is the posterior given P'z over all images. The proposal's exact mean corrects it.

    The r leading principal components of an image are y = P'(x − mean). The posterior of the images given P'z alone,
    q_i ∝ exp(−‖P'(z − mean) − y_i‖²/2t²), costs a product of r dimensions instead of d, and so does its mean of y.
    Of n gathered images, the most probable are kept and the others are drawn from the rest of q in proportion to q.
    All are weighted by exact likelihood over q. A control variate then subtracts the known effect of the drawing on
    the mean of y: π·P(mean of the drawn y − E_q[y]), both over the rest, where π is the rest's estimated posterior
    share.

    The sampled part is biased, O(1/n), and consistent. The estimate is exact if n images hold the whole posterior, or
    if r = d. There is no search, so there is no k. `docs/subspace_knn.md` derives the estimator.

    Args:
        r: principal components; null for 512, or min(N, d) if that is less. A larger r lowers the error and takes
            longer.
        m: most probable images kept per z; null keeps those that n draws without repetition are sure to contain.
        n: most images gathered per z; null for 256, or N if that is less. If fewer hold the whole posterior, only
            these are gathered.
        compute: type of the two products: `float32`, `bfloat16`, or `auto` for the fastest type of the device.

    Raises:
        InputError: r, m or n < 1, m > n, an unknown type; at `bind`, r > min(N, d), n > N, or a type that the device
            does not multiply.
    """

    shardable = True

    r = Count(DEFAULT_R, COMPONENTS)
    n = Count(DEFAULT_N, IMAGES)

    def __init__(self, r: int | None = None, m: int | None = None, n: int | None = None, compute: str = "auto") -> None:
        self.r, self.n = r, n
        self.m = None if m is None else check_count("SubspaceKNN", "m", m)
        self._check_kept()
        self.compute = check_compute("SubspaceKNN", compute)

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Projects the images. On a GPU, tries the kernels that read drawn images."""
        super().bind(reference)
        fuses(reference)
        self._check_kept()
        self._projection()
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds the coordinates of all images and the components."""
        r, dtype = SubspaceKNN.r.within(self, N, d), planned_dtype("SubspaceKNN", self.compute, device)
        size = N * (r * dtype.itemsize + 4) + 4 * r * d
        return Holdings(arrays={f"r={r} coordinates, {str(dtype).removeprefix('torch.')}": size})

    def _check_kept(self) -> None:
        if self.m is not None and self.m > self.n:
            raise InputError(f"SubspaceKNN: m={self.m} is more than n={self.n}")

    def _projection(self) -> Projection:
        reference = self.reference
        return projection_of(reference, self.r, compute_dtype("SubspaceKNN", self.compute, reference.device))

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        mu = torch.empty(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        excess = torch.empty(len(z), self.r, dtype=torch.float32, device=z.device)
        for rows, images, weights, draws in self._weighted(self._draw(z, t, generator), z, t):
            if isinstance(rows, slice):  # All rows at once.
                mu, excess = images.mean(weights), self._excess(weights, draws)
                break
            mu[rows] = images.mean(weights).to(mu.dtype)
            excess[rows] = self._excess(weights, draws)
        # Use one product for all rows, because P is large and reading it for a few rows at a time would be slow.
        return mu - self._projection().components.expand(excess).view(mu.shape)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        # The proposal only approximates the posterior of warped images, so images with negligible shares may be likely.
        draws = self._draw(*warp.query(z, t, x_source, self.reference.mean()), generator, negligible_share=0.0)
        mean = torch.empty_like(x_source)
        for rows, images, weights, part in self._weighted(draws, z, t, warp):
            excess = self._projection().components.expand(self._excess(weights, part)).view(-1, *z.shape[1:])
            mean[rows] = (images.mean(weights) - excess).to(mean.dtype)
        return warp.apply(mean)

    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Certificate:
        parts, order = [], []
        for rows, images, weights, draws in self._weighted(self._draw(z, t, generator), z, t):
            excess = self._projection().components.expand(self._excess(weights, draws)).view(-1, *z.shape[1:])
            mean = images.mean(weights).to(images.dtype) - excess
            sq_error = self._sq_error(weights, images, mean, excess, draws)
            parts.append(Certificate(mean, *weight_spread(weights), sq_error))
            order.append(rows)
        return in_order(parts, order)

    def _draw(
        self, z: Tensor, t: Tensor, generator: torch.Generator | None, negligible_share: float = NEGLIGIBLE_SHARE
    ) -> SubspaceDraws:
        """Choose the images of each z from the posterior given P'z alone."""
        projection = self._projection()
        y = projection.components.project(z)
        # The largest array of a piece is (b, N) in float32. Use few pieces, because each reads all coordinates twice.
        rows_of_piece = max(work_bytes(z.device) // (4 * self.reference.N), MIN_ROWS)
        num_pieces = max(-(-len(z) // rows_of_piece), 1)
        log_share = math.log(negligible_share) if negligible_share > 0 else -math.inf
        pieces = [
            self._draw_rows(projection, *rows, log_share, generator)
            for rows in zip(y.tensor_split(num_pieces), t.tensor_split(num_pieces), strict=True)
        ]
        return pieces[0] if num_pieces == 1 else SubspaceDraws(*map(torch.cat, zip(*pieces, strict=True)))

    def _weighted(
        self, draws: SubspaceDraws, z: Tensor, t: Tensor, warp: Warp | None = None
    ) -> Iterator[tuple[Tensor | slice, DrawnImages, Tensor, SubspaceDraws]]:
        """Yield some rows, the images drawn for these b rows, their weights (b, places) and draws, in any order.

        With `warp`, the likelihoods are computed from the warped images.
        """
        for rows, images in drawn_images(self.reference, draws.ids, draws.used, warp=warp):
            chosen = draws.rows(rows, images.places)
            log_p = unnormalised_log_likelihood(images.sq_dist(z[rows]), t[rows])
            yield rows, images, torch.softmax(log_p + chosen.log_correction, dim=1), chosen

    def _draw_rows(
        self, projection: Projection, y: Tensor, t: Tensor, log_share: float, generator: torch.Generator | None
    ) -> SubspaceDraws:
        """Choose the images of some rows from the posterior given y = P'(z − mean), (b, r)."""
        coordinates, noise = projection.coordinates, t.square()
        log_q = matmul_float32(y.to(coordinates.dtype), coordinates.T).sub_(projection.half_sq_norms)
        log_q.div_(noise.unsqueeze(1).float().clamp_(min=LEAST_NOISE))
        # Largest rounding error of the low-precision product. Rounding must not make likely images look negligible.
        rounding = torch.finfo(coordinates.dtype).eps * y.norm(dim=1) * self._largest_norm(projection) / noise
        log_negligible = log_share - 2 * rounding.double()
        draws = stratified_draws(log_q, self.n, log_negligible, self.m, generator)
        return SubspaceDraws(*draws[:4], self._rest_mean(draws, coordinates))

    def _rest_mean(self, draws: StratifiedDraws, coordinates: Tensor) -> Tensor:
        """Average the coordinates (N, r) over the rest of each row that draws from it: (B, r); 0 for the other rows."""
        if coordinates.is_cuda:
            # The number of these rows is not known to the host.
            return _mean_of_rest(draws.rest, coordinates)
        draws_some = draws.sampled.any(1)
        mean = coordinates.new_zeros(len(draws_some), coordinates.shape[1], dtype=torch.float32)
        if draws_some.all():
            return _mean_of_rest(draws.rest, coordinates)
        if draws_some.any():
            mean[draws_some] = _mean_of_rest(draws.rest[draws_some], coordinates)
        return mean

    def _largest_norm(self, projection: Projection) -> Tensor:
        """Return the largest norm of an image in coordinates, a scalar. It is computed once."""
        key = "largest coordinates", self.r, projection.coordinates.dtype
        return self.reference.cached(key, lambda: (2 * projection.half_sq_norms.max()).sqrt())

    def _excess(self, weights: Tensor, draws: SubspaceDraws) -> Tensor:
        """Return the known error of the mean of y that the choice of drawn images causes: (b, r), float32."""
        projection, sampled = self._projection(), draws.sampled
        count = sampled.sum(1, keepdim=True)
        mean = _sums_of_drawn(draws.ids, sampled, projection.coordinates).div_(count.clamp_(min=1))
        share = (weights * sampled).sum(1, keepdim=True).float()
        # `share` is 0 if nothing is drawn.
        return share * (mean - draws.rest_mean)

    def _sq_error(
        self, weights: Tensor, images: DrawnImages, mean: Tensor, excess: Tensor, draws: SubspaceDraws
    ) -> Tensor:
        """Estimate the squared error per dimension, (b,), float64, from the spread of the draws' contributions.

        Each of s draws, which together weigh π, contributes c = w(x − μ̂) − π/s·P(y − E_q[y]). If the draws were
        independent, their sum would have the variance s/(s − 1)·Σ|c − c̄|²; draws without repetition vary less. For
        s = 1 the estimate is |c|². It is infinite if m = n leaves no place to draw from an existing rest.
        """
        projection, sampled = self._projection(), draws.sampled
        count = sampled.sum(1)
        weights = torch.where(sampled, weights, 0.0)
        share = weights.sum(1, keepdim=True) / count.clamp(min=1).unsqueeze(1)
        along = projection.coordinates[draws.ids].float()
        from_mean = along - projection.components.project(mean).unsqueeze(1)
        from_rest = torch.where(sampled.unsqueeze(2), along - draws.rest_mean.unsqueeze(1), 0.0)
        # Unused places have no weight, and their distances may be infinite.
        sq_dist = torch.where(sampled, images.sq_dist(mean), 0.0)
        squares = (
            weights.square() * sq_dist
            - 2 * weights * share * (from_mean * from_rest).sum(2)
            + share.square() * from_rest.square().sum(2)
        ).sum(1)
        # Σc over the draws is not 0, because it balances the kept images, which do not vary. The error is the spread of
        # c around its mean, so |Σc|²/s is subtracted.
        total = (images.deviation(weights, mean) - excess).flatten(1)
        centred = squares - total.double().square().sum(1) / count.clamp(min=1)
        # Rounding may make a sum of squares negative, because it is expanded.
        variance = torch.where(count > 1, centred * count / (count - 1).clamp(min=1), squares).clamp(min=0)
        untold = (draws.used == self.n) & (self.m == self.n < self.reference.N)
        return torch.where(untold, math.inf, variance / self.reference.d)


def _sums_of_drawn(ids: Tensor, sampled: Tensor, coordinates: Tensor) -> Tensor:
    """Sum the coordinates (N, r) of each row's drawn images, `ids` (B, n) where `sampled`: (B, r), float32."""
    if coordinates.dtype == torch.float32:
        # This operation reads the coordinates in place.
        return torch.nn.functional.embedding_bag(ids, coordinates, mode="sum", per_sample_weights=sampled.float())
    return torch.bmm(sampled.float().unsqueeze(1), coordinates[ids].float()).squeeze(1)


def _mean_of_rest(rest: Tensor, coordinates: Tensor) -> Tensor:
    """Average the coordinates (N, r) over each row's rest (B, N): (B, r), 0 for an empty rest. Overwrites `rest`.

    All rows share one product. No row may hold a NaN, because on some processors it would spread to other rows.
    """
    # Each row is divided by its largest value. Otherwise bfloat16 might round all values of a tiny row to 0.
    largest, dtype = rest.amax(1, keepdim=True).clamp_(min=TINY), coordinates.dtype
    rest = torch.div(rest, largest, out=rest if dtype == rest.dtype else torch.empty_like(rest, dtype=dtype))
    total = rest.sum(1, keepdim=True, dtype=torch.float32).clamp_(min=TINY)
    return matmul_float32(rest, coordinates).div_(total)
