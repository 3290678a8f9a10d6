"""The subspace estimator: the leading principal components of all images give the proposal and a correction."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.memory import work_bytes
from lit_knn.estimators.counts import Limit, count, fitted_count, of_components, of_images
from lit_knn.estimators.drawing import Certificate, DrawingEstimator
from lit_knn.estimators.draws import Draws, ResultRows, drawn_images, weights_of
from lit_knn.index.pca import Projection
from lit_knn.index.precision import check_compute, compute_dtype, matmul_float32
from lit_knn.reference import ReferenceSet
from lit_knn.reference.gathered import Images
from lit_knn.reference.principal import projection_of
from lit_knn.theory.stratified import stratified_draws
from lit_knn.theory.warp import Warp

# Images that together have less than this share of the proposal are left out. They hold the same share of the posterior
# on average. Leaving out these images adds a squared error of at most this share times a squared distance in the data.
NEGLIGIBLE_SHARE = 1e-8
# Minimum number of latents per piece. With fewer latents, reading the coordinates takes longer than multiplying them.
MIN_ROWS = 32
# Minimum noise variance of the proposal. With a smaller variance, float32 could not hold the logarithms.
LEAST_NOISE = 1e-30
# This divisor replaces 0 where the numerator is also 0. Some processors would round a smaller number to 0.
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class SubspaceDraws(Draws):
    """`Draws` that keep the most probable images and draw others from the rest of the proposal."""

    sampled: Tensor  # (B, n), bool, which images are draws from the rest; the others are kept
    rest_mean: Tensor  # (B, r), float32, the exact E_q[y] over the rest


class SubspaceKNN(DrawingEstimator):
    """SNIS (Eq. 11) whose proposal is the posterior given P'z over all images. The proposal's exact mean corrects it.

    The r leading principal components of an image are y = P'(x − mean). The posterior of the images given only P'z,
    q_i ∝ exp(−‖P'(z − mean) − y_i‖²/2t²), costs a product of r dimensions instead of d, and so does the mean of y under
    q. The most probable of the n gathered images are kept; the others are drawn from the rest of q in proportion to q.
    All are weighted by exact likelihood over q. A control variate then subtracts the known effect of the drawing on the
    mean of y: π·P(mean of the drawn y − E_q[y]). Both means are over the rest, and π is the rest's estimated posterior
    share.

    The sampled part is biased, O(1/n), and consistent. The estimate is exact if n images hold the whole posterior, or
    if r = d. There is no search, so there is no k. `docs/subspace_knn.md` derives the estimator.

    Args:
        r: principal components, at most min(N, d); null for 512, or min(N, d) if that is less. A larger r lowers the
            error and takes longer.
        n: maximum images gathered per z, at most N; null for 256, or N if that is less. If fewer hold the whole
            posterior, only these are gathered.
        compute: type of the two products: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU that multiplies it, else
            float32. `bind` refuses bfloat16 on a CPU, or on a GPU that does not multiply it.
    """

    shardable = True
    limits: ClassVar[Mapping[str, Limit]] = {"r": of_components, "n": of_images}

    def __init__(self, r: int | None = None, n: int | None = None, compute: str = "auto") -> None:
        self.r = count(self, "r", r)
        self.n = count(self, "n", n)
        self.compute = check_compute("SubspaceKNN", compute)

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        self._projection()
        return self

    def memory(self, N: int, d: int) -> dict[str, int]:
        r = fitted_count(self, "r", N, d)
        # `auto` counts as float32, which takes more than bfloat16.
        coordinate = 2 if self.compute == "bfloat16" else 4
        return {f"r={r} coordinates": N * (r * coordinate + 4) + 4 * r * d}

    def _projection(self) -> Projection:
        reference = self.reference
        return projection_of(reference, self.r, self._dtype(reference.device))

    def _dtype(self, device: torch.device) -> torch.dtype:
        # If more than n images lie within the rounding of a CPU's sums, the source of z is not gathered.
        if device.type == "cpu" and self.compute == "bfloat16":
            raise InputError(
                "SubspaceKNN: compute=bfloat16: a CPU rounds the sums of such products; use float32"
            )
        return compute_dtype("SubspaceKNN", self.compute, device)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        t = t.flatten()
        draws = self.draw(z, t, x_source, generator)
        return self._corrected_mean(draws, z, t)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: Generator | None
    ) -> Tensor:
        t = t.flatten()
        near_z, near_t = warp.query(z, t, x_source, self.reference.mean())
        # The proposal only approximates the posterior of warped images, so images with negligible shares may be likely.
        draws = self.draw(near_z, near_t, None, generator, negligible_share=0.0)
        return warp.apply(self._corrected_mean(draws, z, t, warp).to(x_source.dtype))

    def _corrected_mean(
        self, draws: SubspaceDraws, z: Tensor, t: Tensor, warp: Warp | None = None
    ) -> Tensor:
        """Average the drawn images (Eq. 11), minus the known effect of the drawing."""
        # With float32 images, a float64 mean would differ from the mean of the certificate.
        wide = torch.promote_types(z.dtype, torch.float32)
        results = ResultRows(len(z))
        for rows, images in drawn_images(self.reference, draws, warp):
            weights = weights_of(draws, images, rows, z, t)
            results.put(rows, images.mean(weights).to(wide), self._excess(weights, draws, rows))

        mean, excess = results.columns
        # Use one product for all rows, because P is large: reading P again for every few rows would be slow.
        return mean - self._projection().components.expand(excess).view(mean.shape)

    def _certificate(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Certificate:
        t = t.flatten()
        draws = self.draw(z, t, x_source, generator)
        wide = torch.promote_types(z.dtype, torch.float32)
        results = ResultRows(len(z))
        for rows, images in drawn_images(self.reference, draws):
            weights = weights_of(draws, images, rows, z, t)
            excess = (
                self._projection()
                .components.expand(self._excess(weights, draws, rows))
                .view(-1, *z.shape[1:])
            )
            mean = images.mean(weights).to(wide) - excess

            sample_size = 1 / weights.square().sum(1)
            sq_error = self._sq_error(weights, images, mean, excess, draws, rows)
            results.put(rows, mean, sample_size, weights.amax(1), sq_error)
        return Certificate(*results.columns)

    def draw(
        self,
        z: Tensor,
        t: Tensor,
        x_source: Tensor | None,
        generator: Generator | None,
        negligible_share: float = NEGLIGIBLE_SHARE,
    ) -> SubspaceDraws:
        """Choose the images of each z from the posterior given only P'z."""
        projection = self._projection()
        y = projection.components.project(z)
        # The largest array of a piece is (b, N) in float32. Use few pieces, because each reads all coordinates twice.
        rows_of_piece = max(work_bytes(z.device) // (4 * self.reference.N), MIN_ROWS)
        num_pieces = max(-(-len(z) // rows_of_piece), 1)
        log_share = math.log(negligible_share) if negligible_share > 0 else -math.inf

        pieces = []
        for y_rows, t_rows in zip(
            y.tensor_split(num_pieces), t.tensor_split(num_pieces), strict=True
        ):
            pieces.append(self._draw_rows(projection, y_rows, t_rows, log_share, generator))
        ids, log_factor, sampled, rest_mean = (
            torch.cat(part) for part in zip(*pieces, strict=True)
        )
        return SubspaceDraws(ids=ids, log_factor=log_factor, sampled=sampled, rest_mean=rest_mean)

    def _draw_rows(
        self,
        projection: Projection,
        y: Tensor,
        t: Tensor,
        log_share: float,
        generator: Generator | None,
    ) -> tuple[Tensor, ...]:
        """Choose the images of some rows, given y = P'(z − mean), (b, r): the tensors of their `SubspaceDraws`."""
        coordinates, noise = projection.coordinates, t.square()
        log_q = matmul_float32(y.to(coordinates.dtype), coordinates.T).sub_(
            projection.half_sq_norms
        )
        log_q.div_(noise.unsqueeze(1).float().clamp_(min=LEAST_NOISE))
        key = "largest norm in coordinates", self.r, coordinates.dtype
        largest_norm = self.reference.cached(
            key, lambda: (2 * projection.half_sq_norms.max()).sqrt()
        )
        # Largest rounding error of the low-precision product. Rounding must not make likely images look negligible.
        rounding = torch.finfo(coordinates.dtype).eps * y.norm(dim=1) * largest_norm / noise
        draws = stratified_draws(log_q, self.n, log_share - 2 * rounding.double(), generator)
        rest_mean = self._rest_mean(draws.rest, draws.sampled, coordinates)
        return draws.ids, draws.log_correction, draws.sampled, rest_mean

    def _rest_mean(self, rest: Tensor, sampled: Tensor, coordinates: Tensor) -> Tensor:
        """Average the coordinates (N, r) over the rest of each row that draws from it: (B, r); 0 for the other rows."""
        some = sampled.any(1)
        # The host of a GPU does not know the number of these rows.
        if coordinates.is_cuda or some.all():
            return _mean_of_rest(rest, coordinates)
        mean = coordinates.new_zeros(len(some), coordinates.shape[1], dtype=torch.float32)
        if some.any():
            mean[some] = _mean_of_rest(rest[some], coordinates)
        return mean

    def _excess(self, weights: Tensor, draws: SubspaceDraws, rows: Tensor) -> Tensor:
        """Return the known error that the drawing causes in the mean of y: (b, r), float32."""
        ids, sampled = (part[rows, : weights.shape[1]] for part in (draws.ids, draws.sampled))
        mean = _sums_of_drawn(ids, sampled, self._projection().coordinates)
        mean.div_(sampled.sum(1, keepdim=True).clamp_(min=1))
        # The share is 0 if nothing is drawn.
        share = (weights * sampled).sum(1, keepdim=True).float()
        return share * (mean - draws.rest_mean[rows])

    def _sq_error(
        self,
        weights: Tensor,
        images: Images,
        mean: Tensor,
        excess: Tensor,
        draws: SubspaceDraws,
        rows: Tensor,
    ) -> Tensor:
        """Estimate the squared error per dimension, (b,), float64, from the spread of the draws' contributions.

        Each of s draws, which together weigh π, contributes c = w(x − μ̂) − π/s·P(y − E_q[y]). If the draws were
        independent, their sum would have the variance s/(s − 1)·Σ|c − c̄|²; draws without repetition vary less. For
        s = 1 the estimate is |c|².
        """
        projection = self._projection()
        ids, sampled = (part[rows, : images.places] for part in (draws.ids, draws.sampled))
        count, weights = sampled.sum(1), torch.where(sampled, weights, 0.0)
        share = weights.sum(1, keepdim=True) / count.clamp(min=1).unsqueeze(1)
        along = projection.coordinates[ids].float()
        from_mean = along - projection.components.project(mean).unsqueeze(1)
        from_rest = torch.where(
            sampled.unsqueeze(2), along - draws.rest_mean[rows].unsqueeze(1), 0.0
        )
        squares = (
            weights.square() * images.sq_dist(mean)
            - 2 * weights * share * (from_mean * from_rest).sum(2)
            + share.square() * from_rest.square().sum(2)
        ).sum(1)
        # Σc over the draws is not 0, because it balances the kept images, which do not vary. The error is the spread of
        # c around its mean, so |Σc|²/s is subtracted.
        total = (images.deviation(weights, mean) - excess).flatten(1)
        centred = squares - total.double().square().sum(1) / count.clamp(min=1)
        # The sum of squares is expanded, so rounding may make it negative.
        variance = torch.where(
            count > 1, centred * count / (count - 1).clamp(min=1), squares
        ).clamp(min=0)
        return variance / self.reference.d


def _sums_of_drawn(ids: Tensor, sampled: Tensor, coordinates: Tensor) -> Tensor:
    """Sum the coordinates (N, r) of each row's drawn images, `ids` (B, n) where `sampled`: (B, r), float32."""
    if coordinates.dtype == torch.float32:
        # This operation reads the coordinates in place.
        return torch.nn.functional.embedding_bag(
            ids, coordinates, mode="sum", per_sample_weights=sampled.float()
        )
    return torch.bmm(sampled.float().unsqueeze(1), coordinates[ids].float()).squeeze(1)


def _mean_of_rest(rest: Tensor, coordinates: Tensor) -> Tensor:
    """Average the coordinates (N, r) over each row's rest (B, N): (B, r), 0 for an empty rest. Overwrites `rest`.

    One matrix product computes all rows. No row may hold a NaN, because on some processors a NaN spreads to other rows.
    """
    # Each row is divided by its largest value. Otherwise bfloat16 might round all values of a tiny row to 0.
    largest, dtype = rest.amax(1, keepdim=True).clamp_(min=TINY), coordinates.dtype
    rest = torch.div(
        rest, largest, out=rest if dtype == rest.dtype else torch.empty_like(rest, dtype=dtype)
    )
    total = rest.sum(1, keepdim=True, dtype=torch.float32).clamp_(min=TINY)
    return matmul_float32(rest, coordinates).div_(total)
