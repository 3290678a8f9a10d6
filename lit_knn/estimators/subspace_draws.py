"""Chooses images by their posterior given only the principal components of z, for `SubspaceKNN`."""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lit_knn.common.memory import work_bytes
from lit_knn.estimators.draws import Draws
from lit_knn.index.pca import Projection
from lit_knn.index.precision import matmul_float32
from lit_knn.reference import ReferenceSet
from lit_knn.theory.stratified import stratified_draws

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
    """`Draws` that consist of the most probable images, which are kept, and of draws from the rest of the proposal.

    Attributes:
        sampled: (B, n), bool, which images are draws from the rest; the others are kept.
        rest_mean: (B, r), float32, the exact mean of the coordinates y over the rest of the proposal.
    """

    sampled: Tensor
    rest_mean: Tensor

    def of_rows(self, rows: Tensor, places: int) -> "SubspaceDraws":
        """Select the first places of some rows, (b,) int64."""
        return SubspaceDraws(
            ids=self.ids[rows, :places],
            log_factor=self.log_factor[rows, :places],
            sampled=self.sampled[rows, :places],
            rest_mean=self.rest_mean[rows],
        )


def subspace_draws(
    reference: ReferenceSet,
    projection: Projection,
    z: Tensor,
    t: Tensor,
    n: int,
    negligible_share: float,
    generator: Generator | None,
) -> SubspaceDraws:
    """Choose the images of each z by their posterior given only P'z, the principal components of z.

    Args:
        reference: the set of the images.
        projection: its principal components and coordinates.
        z: (B, *shape).
        t: (B,).
        n: maximum number of images for each z.
        negligible_share: images that together have less than this share of the proposal are left out.
        generator: source of randomness, on the device of `z`.
    """
    y = projection.components.project(z)
    largest_norm = _largest_norm(reference, projection)
    log_share = math.log(negligible_share) if negligible_share > 0 else -math.inf

    # The largest array of a piece is (b, N) in float32. Use few pieces, because each reads all coordinates twice.
    rows_of_piece = max(work_bytes(z.device) // (4 * reference.N), MIN_ROWS)
    num_pieces = max(math.ceil(len(z) / rows_of_piece), 1)
    y_pieces, t_pieces = y.tensor_split(num_pieces), t.tensor_split(num_pieces)

    pieces = []
    for y_rows, t_rows in zip(y_pieces, t_pieces, strict=True):
        log_q = _log_proposal(projection, y_rows, t_rows)
        # Largest rounding error of the low-precision product. Rounding must not make likely images look negligible.
        eps = torch.finfo(projection.coordinates.dtype).eps
        rounding = eps * y_rows.norm(dim=1) * largest_norm / t_rows.square()
        draws = stratified_draws(log_q, n, log_share - 2 * rounding.double(), generator)

        rest_mean = _rest_mean(draws.rest, draws.sampled, projection.coordinates)
        pieces.append((draws.ids, draws.log_correction, draws.sampled, rest_mean))

    ids, log_factor, sampled, rest_mean = (torch.cat(part) for part in zip(*pieces, strict=True))
    return SubspaceDraws(ids=ids, log_factor=log_factor, sampled=sampled, rest_mean=rest_mean)


def _largest_norm(reference: ReferenceSet, projection: Projection) -> Tensor:
    """Return the largest norm of the images' coordinates, a scalar. It is computed once."""
    _, r = projection.coordinates.shape
    key = "largest norm in coordinates", r, projection.coordinates.dtype
    return reference.cached(key, lambda: (2 * projection.half_sq_norms.max()).sqrt())


def _log_proposal(projection: Projection, y: Tensor, t: Tensor) -> Tensor:
    """Return log q of all images, up to a constant per row, given y = P'(z − mean), (b, r): (b, N), float32."""
    coordinates = projection.coordinates
    log_q = matmul_float32(y.to(coordinates.dtype), coordinates.T)
    log_q.sub_(projection.half_sq_norms)

    noise = t.square().unsqueeze(1).float()
    return log_q.div_(noise.clamp_(min=LEAST_NOISE))


def _rest_mean(rest: Tensor, sampled: Tensor, coordinates: Tensor) -> Tensor:
    """Average the coordinates over the rest of the proposal, for each row that draws from it.

    Args:
        rest: (B, N), weights of the images in the rest. Overwritten.
        sampled: (B, n), which images of a row are draws.
        coordinates: (N, r).

    Returns:
        (B, r), float32. On a CPU the rows that draw nothing get 0.
    """
    some = sampled.any(1)
    # On a GPU, finding the rows that draw would make the CPU wait.
    if coordinates.is_cuda or some.all():
        return _weighted_coordinates(rest, coordinates)

    mean = coordinates.new_zeros(len(some), coordinates.shape[1], dtype=torch.float32)
    if some.any():
        mean[some] = _weighted_coordinates(rest[some], coordinates)
    return mean


def _weighted_coordinates(weights: Tensor, coordinates: Tensor) -> Tensor:
    """Return the mean of the coordinates (N, r) by each row of weights (B, N): (B, r). Overwrites `weights`.

    A row of zeros gives 0. One matrix product computes all rows, and on some processors a NaN in it spreads to other
    rows, so no row may hold one.
    """
    # Each row is divided by its largest value. Otherwise all values of a row might be too small for bfloat16.
    largest = weights.amax(1, keepdim=True).clamp_(min=TINY)
    scaled = weights
    if coordinates.dtype != weights.dtype:
        scaled = torch.empty_like(weights, dtype=coordinates.dtype)
    torch.div(weights, largest, out=scaled)

    total = scaled.sum(1, keepdim=True, dtype=torch.float32).clamp_(min=TINY)
    return matmul_float32(scaled, coordinates).div_(total)


def excess_of(projection: Projection, draws: SubspaceDraws, weights: Tensor) -> Tensor:
    """Return the known error of the weighted mean of the coordinates y: the effect of drawing instead of averaging.

    It is π·(mean of the drawn y − E_q[y]), both means over the rest, with the weight π of the drawn images.

    Args:
        projection: components and coordinates of all images.
        draws: of b rows.
        weights: (b, n), of all images of a row, which sum to 1.

    Returns:
        (b, r), float32.
    """
    mean = _sums_of_drawn(draws, projection.coordinates)
    mean.div_(draws.sampled.sum(1, keepdim=True).clamp_(min=1))
    # The weight π of the images that were drawn, not kept: 0 if nothing is drawn.
    share = (weights * draws.sampled).sum(1, keepdim=True).float()
    return share * (mean - draws.rest_mean)


def _sums_of_drawn(draws: SubspaceDraws, coordinates: Tensor) -> Tensor:
    """For each row, sum the coordinates of its images that were sampled, not kept.

    `coordinates` is (N, r). Returns (b, r), float32.
    """
    sampled = draws.sampled.float()
    if coordinates.dtype == torch.float32:
        # This operation sums without a copy of the rows that it sums.
        return torch.nn.functional.embedding_bag(
            draws.ids, coordinates, mode="sum", per_sample_weights=sampled
        )
    return torch.bmm(sampled.unsqueeze(1), coordinates[draws.ids].float()).squeeze(1)
