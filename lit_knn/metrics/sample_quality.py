"""Shares of images that lie among others, and two tests for copies, from features of images."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.index.precision import full_float32

# Distances of one block, in bytes.
BLOCK_BYTES = 256 * 2**20
# The normal law of the rank-sum statistic holds from about 20 values of each kind.
FEWEST_IN_TEST = 20


def neighbour_radii(features: Tensor, k: int) -> Tensor:
    """Return the distance of each of (N, F) features to its k-th nearest other one, (N,)."""
    return nearest_distances(features, features, k, leave_out_itself=True)[:, -1]


def precision_recall(
    generated: Tensor, real: Tensor, k: int = 3, real_radii: Tensor | None = None
) -> dict[str, float]:
    """Compute improved precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991).

    An image has a ball whose radius is the distance to its k-th nearest other image of its set.
    `precision` is the share of generated images in the ball of a real one, and `recall` the share of
    real images in the ball of a generated one.

    Args:
        generated: features (N, F), N > k.
        real: features (M, F), M > k.
        k: number of neighbours; 3 in the paper.
        real_radii: `neighbour_radii(real, k)`, if known.
    """
    fewest = min(len(generated), len(real))
    if not 1 <= k < fewest:
        rule = f"precision and recall of k={k} need more than {k} images of each kind"
        raise InputError(f"{rule}, got {fewest}")

    if real_radii is None:
        real_radii = neighbour_radii(real, k)
    generated_radii = neighbour_radii(generated, k)

    precise = 0
    recalled = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for rows, distances in distance_blocks(generated, real):
        precise += int((distances <= real_radii).any(1).sum())
        recalled |= (distances <= generated_radii[rows, None]).any(0)

    return {
        "precision": precise / len(generated),
        "recall": float(recalled.double().mean()),
    }


def density_and_coverage(
    generated: Tensor, real: Tensor, k: int = 5, real_radii: Tensor | None = None
) -> dict[str, float]:
    """Compute density and coverage (Naeem et al. 2020, arXiv 2002.09797).

    A real image has a ball whose radius is the distance to its k-th nearest other real image. `density` is the mean
    number of balls around a generated image, divided by k; about 1 for samples of the same distribution. `coverage` is
    the share of balls that hold a generated image, about 1 − 2^−k at most for as many generated as real images.

    Args:
        generated: features (N, F).
        real: features (M, F), M > k.
        k: number of neighbours; 5 in the paper.
        real_radii: `neighbour_radii(real, k)`, if known.
    """
    if not 1 <= k < len(real):
        raise InputError(
            f"density and coverage of k={k} need more than {k} real images, got {len(real)}"
        )

    if real_radii is None:
        real_radii = neighbour_radii(real, k)
    balls = 0
    covered = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for _, distances in distance_blocks(generated, real):
        inside = distances < real_radii
        balls += int(inside.sum())
        covered |= inside.any(0)

    return {
        "density": balls / (k * len(generated)),
        "coverage": float(covered.double().mean()),
    }


def is_authentic(generated: Tensor, training: Tensor, spacing: Tensor | None = None) -> Tensor:
    """Return which samples are authentic, (N,) bool (Alaa et al. 2022, arXiv 2102.08921).

    A sample is authentic unless it is nearer to its nearest training image than that image is to any other.

    Args:
        generated: features (N, F).
        training: features (M, F), M > 1.
        spacing: `neighbour_radii(training, 1)`, if known.
    """
    distance, nearest = nearest_neighbours(generated, training, 1)
    if spacing is None:
        spacing = neighbour_radii(training, 1)
    return distance[:, 0] > spacing[nearest[:, 0]]


def copying_score(generated: Tensor, training: Tensor, held_out: Tensor) -> float:
    """Compute C_T, the test for data-copying of Meehan et al. 2020 (arXiv 2004.05675), Eq. 3, with a single cell.

    The distances to the nearest training image are compared between generated and held-out images by a rank-sum test;
    this is its standard score. Far below 0 (−3), samples are nearer to the training images than new images are: they
    are copies. Far above 0 the model underfits.

    Args:
        generated: features (N, F).
        training: features (M, F).
        held_out: features (K, F) of images that no training saw.

    Raises:
        InputError: fewer than 20 images of either kind.
    """
    if min(len(generated), len(held_out)) < FEWEST_IN_TEST:
        raise InputError(f"C_T needs {FEWEST_IN_TEST} generated and held-out images")
    of_generated = nearest_distances(generated, training, 1)[:, 0]
    of_held_out = nearest_distances(held_out, training, 1)[:, 0]
    return rank_sum_score(of_generated, of_held_out)


def rank_sum_score(first: Tensor, second: Tensor) -> float:
    """Return the standard score of the number of pairs in which a value of `first` exceeds one of `second`.

    It is about standard normal if both come from one distribution (Mann & Whitney 1947). A tie counts one half.
    """
    m, n = len(first), len(second)
    ordered = second.sort().values
    below = torch.searchsorted(ordered, first, right=False)
    up_to = torch.searchsorted(ordered, first, right=True)
    pairs = float((below + up_to).double().sum() / 2)
    return (pairs - m * n / 2) / math.sqrt(m * n * (m + n + 1) / 12)


def nearest_distances(
    queries: Tensor, points: Tensor, k: int, leave_out_itself: bool = False
) -> Tensor:
    """Return the ascending L2 distances of queries (N, F) to their k nearest of points (M, F): (N, k).

    With `leave_out_itself` the queries are the points, and a point is no neighbour of itself.
    """
    return nearest_neighbours(queries, points, k, leave_out_itself)[0]


def nearest_neighbours(
    queries: Tensor, points: Tensor, k: int, leave_out_itself: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `nearest_distances` and the numbers of the points, both (N, k)."""
    found_distances, found_numbers = [], []
    for rows, distances in distance_blocks(queries, points):
        if leave_out_itself:
            # The distance of a point to itself is the rounding error, not 0.
            itself = torch.arange(len(distances), device=points.device)
            distances[itself, itself + rows.start] = torch.inf
        values, numbers = distances.topk(k, dim=1, largest=False)
        found_distances.append(values)
        found_numbers.append(numbers)
    return torch.cat(found_distances), torch.cat(found_numbers)


def distance_blocks(queries: Tensor, points: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of the queries (N, F) with their L2 distances to all points (M, F), a block at a time."""
    size = max(BLOCK_BYTES // (4 * len(points)), 1)
    for start in range(0, len(queries), size):
        rows = slice(start, start + size)
        with full_float32():
            distances = torch.cdist(queries[rows], points)
        yield rows, distances
