"""Distances from latents to all images of a reference set, computed in pieces of bounded memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_knn.common.memory import work_bytes
from lit_knn.index.precision import whole_tiles
from lit_knn.reference.reference_set import ReferenceSet
from lit_knn.theory.posterior import cross_sq_dist, direct_sq_dist
from lit_knn.theory.warp import Warp


def batches_of(z: Tensor, floats_per_item: int) -> Iterator[slice]:
    """Yield slices of the items of `z`, whose arrays of `floats_per_item` float64 numbers per item fit `work_bytes`."""
    step = max(work_bytes(z.device) // (8 * floats_per_item), 1)
    for start in range(0, len(z), step):
        yield slice(start, min(start + step, len(z)))


def all_sq_dist(reference: ReferenceSet, z: Tensor) -> Tensor:
    """Compute ‖z − x‖² to all images by `stream_sq_dist`: (B, N) float64. Use `batches_of` to limit the memory."""
    sq_dist = torch.empty(len(z), reference.N, dtype=torch.float64, device=z.device)
    for ids, _, chunk in stream_sq_dist(reference, z):
        sq_dist[:, ids] = chunk
    return sq_dist


def stream_sq_dist(
    reference: ReferenceSet, z: Tensor, warp: Warp | None = None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Compute ‖z − x‖² from each z to all images, some of the images at a time.

    Args:
        reference: the images.
        z: (B, *shape), latents; B is at most a few thousand, see `batches_of`.
        warp: B maps A; the distances are then from z to A x.

    Yields:
        A slice of ids, their images (c, d) float32, and the squared distances (B, c) float64.
    """
    if warp is None:
        flat = z.flatten(1).double()
        rows = whole_tiles(work_bytes(z.device) // (8 * (reference.d + len(z))))
    else:
        rows = max(work_bytes(z.device) // (8 * reference.d * max(len(z), 1)), 1)
    for start, x in reference.chunks(rows):
        if warp is None:
            sq_dist = cross_sq_dist(flat, x.flatten(1))
        else:
            sq_dist = direct_sq_dist(z, warp.apply(x.expand(len(z), *x.shape)))
        yield slice(start, start + len(x)), x.flatten(1), sq_dist
