"""Two PyTorch operations on gathered images: squared distances and a weighted mean, without a copy of the images.

They are registered as `torch.ops.lit_knn.gathered_sq_dist` and `gathered_mean`, so that `torch.compile` and profilers
see one operation each. On CUDA a Triton kernel reads each drawn image once, in its stored type; without Triton, and on
a CPU, PyTorch gathers the images in pieces. Use them through `lit_knn.reference.gathered`.
"""

import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from lit_knn.reference.reference_set import to_model_space
from lit_knn.reference.streaming import work_bytes
from lit_knn.theory.posterior import direct_sq_dist
from lit_knn.theory.snis import weighted_deviation


def has_triton() -> bool:
    """Tells whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def plain_sq_dist(images: Tensor, ids: Tensor, used: Tensor | None, z: Tensor, width: int) -> Tensor:
    """Compute ‖z − x‖² of gathered images by PyTorch, in bounded memory: (B, n) float64.

    Args:
        images: (N, d), uint8 pixels or float32.
        ids: (B, n), int64 or int32. An id below 0 is no image: its distance is inf. An id from N on is the mirror of
            image id − N.
        used: (B,), number of used places of each row, which come first; None means all. Other distances are inf.
        z: (B, d), float, in model space.
        width: length of the axis that mirroring reverses, the last of an image; 0 if no image is mirrored.
    """
    sq_dist = torch.empty(ids.shape, dtype=torch.float64, device=ids.device)
    there = _there(ids, used)
    for rows, places, x in _pieces(images, torch.where(there, ids, 0), width):
        sq_dist[rows, places] = direct_sq_dist(z[rows], x)
    return torch.where(there, sq_dist, torch.inf)


def plain_mean(
    images: Tensor, ids: Tensor, used: Tensor | None, weights: Tensor, source: Tensor | None, width: int
) -> Tensor:
    """Compute Σ_i w_i x_i of gathered images by PyTorch, in bounded memory: (B, d) float64.

    It is c + Σ_i w_i (x_i − c), where c is the image with the largest weight, for the reason that
    `theory.snis.weighted_mean` tells.

    Args:
        images: as in `plain_sq_dist`.
        ids: as in `plain_sq_dist`; ids below 0 are left out.
        used: as in `plain_sq_dist`; other places are left out.
        weights: (B, n), or (B, 1 + n) with a source; rows sum to 1.
        source: (B, d), float, one more image for each row, placed first; or None.
        width: as in `plain_sq_dist`.
    """
    there = _there(ids, used)
    ids = torch.where(there, ids, 0)
    own, heaviest = weights[:, weights.shape[1] - ids.shape[1] :], weights.argmax(1, keepdim=True)
    own = torch.where(there, own, 0.0)
    if source is None:
        centre = _taken(images, ids.gather(1, heaviest), width)[:, 0]
        total = torch.zeros(centre.shape, dtype=torch.float64, device=images.device)
    else:
        source = source.float()
        centre = torch.where(
            heaviest == 0, source, _taken(images, ids.gather(1, (heaviest - 1).clamp(min=0)), width)[:, 0]
        )
        total = weighted_deviation(weights[:, :1], source.unsqueeze(1), centre).double()
    for rows, places, x in _pieces(images, ids, width):
        total[rows] += weighted_deviation(own[rows, places], x, centre[rows])
    return centre + total


def _there(ids: Tensor, used: Tensor | None) -> Tensor:
    """Tell which places hold an image that counts: (B, n)."""
    there = ids >= 0
    return there if used is None else there & (torch.arange(ids.shape[1], device=ids.device) < used.unsqueeze(1))


def _pieces(images: Tensor, ids: Tensor, width: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield slices of rows and of places of `ids` (B, n), with their images (b, p, d), float32."""
    (B, n), d = ids.shape, images.shape[1]
    budget = work_bytes(images.device) // (4 * d)
    places = max(min(n, budget), 1)
    rows = max(budget // places, 1)
    for start in range(0, B, rows):
        for first in range(0, n, places):
            piece = slice(start, start + rows), slice(first, first + places)
            yield *piece, _taken(images, ids[piece], width)


def _taken(images: Tensor, ids: Tensor, width: int) -> Tensor:
    """Gather images (*ids.shape, d) in model space."""
    stored = len(images)
    x = to_model_space(images.index_select(0, ids.reshape(-1) % stored)).reshape(*ids.shape, images.shape[1])
    if width == 0:
        return x
    flipped = x.unflatten(-1, (-1, width)).flip(-1).flatten(-2)
    return torch.where((ids >= stored).unsqueeze(-1), flipped, x)


@torch.library.custom_op(
    "lit_knn::gathered_sq_dist",
    mutates_args=(),
    schema="(Tensor images, Tensor ids, Tensor? used, Tensor z, int width) -> Tensor",
)
def sq_dist(images: Tensor, ids: Tensor, used: Tensor | None, z: Tensor, width: int) -> Tensor:
    """See `plain_sq_dist`."""
    return plain_sq_dist(images, ids, used, z, width)


@sq_dist.register_kernel("cuda")
def _sq_dist_cuda(images: Tensor, ids: Tensor, used: Tensor | None, z: Tensor, width: int) -> Tensor:
    if not has_triton():
        return plain_sq_dist(images, ids, used, z, width)
    from lit_knn.reference import gathered_kernels

    return gathered_kernels.sq_dist(images, ids, used, z, width)


@sq_dist.register_fake
def _sq_dist_shape(images: Tensor, ids: Tensor, used: Tensor | None, z: Tensor, width: int) -> Tensor:
    return torch.empty(ids.shape, dtype=torch.float64, device=images.device)


@torch.library.custom_op(
    "lit_knn::gathered_mean",
    mutates_args=(),
    schema="(Tensor images, Tensor ids, Tensor? used, Tensor weights, Tensor? source, int width) -> Tensor",
)
def mean(
    images: Tensor, ids: Tensor, used: Tensor | None, weights: Tensor, source: Tensor | None, width: int
) -> Tensor:
    """See `plain_mean`."""
    return plain_mean(images, ids, used, weights, source, width)


@mean.register_kernel("cuda")
def _mean_cuda(
    images: Tensor, ids: Tensor, used: Tensor | None, weights: Tensor, source: Tensor | None, width: int
) -> Tensor:
    if not has_triton():
        return plain_mean(images, ids, used, weights, source, width)
    from lit_knn.reference import gathered_kernels

    return gathered_kernels.mean(images, ids, used, weights, source, width)


@mean.register_fake
def _mean_shape(
    images: Tensor, ids: Tensor, used: Tensor | None, weights: Tensor, source: Tensor | None, width: int
) -> Tensor:
    return torch.empty(len(ids), images.shape[1], dtype=torch.float64, device=images.device)
