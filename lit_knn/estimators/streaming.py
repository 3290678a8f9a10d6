"""Distances of latents to all images of a reference set, in pieces of bounded memory."""

from collections.abc import Iterator

from torch import Tensor

from lit_knn.posterior import cross_sq_dist
from lit_knn.reference import ReferenceSet

# Upper bound of one float64 work array. Small enough to stay near the cache of a CPU, large enough to keep the
# matrix products efficient.
WORK_BYTES = 64 * 2**20


def batches_of(size: int, floats_per_item: int) -> Iterator[slice]:
    """Split `size` items so that `floats_per_item` float64 numbers for each item of a slice stay in WORK_BYTES."""
    step = max(WORK_BYTES // (8 * floats_per_item), 1)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def stream_sq_dist(reference: ReferenceSet, z: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Stream the reference set past the latents.

    Args:
        reference: the set.
        z: (B, *shape); B at most a few thousand, see `batches_of`.

    Yields:
        The slice of ids, their images (c, d) float32, and ‖z − x‖² (B, c) float64.
    """
    z = z.flatten(1).double()
    rows = max(WORK_BYTES // (8 * (reference.d + len(z))), 1)
    for start, x in reference.chunks(rows):
        x = x.flatten(1)
        yield slice(start, start + len(x)), x, cross_sq_dist(z, x)
