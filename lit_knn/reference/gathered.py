"""Distances to drawn images and their weighted mean, on CUDA without gathering the images.

    sq_dist = gathered_sq_dist(reference, ids, z)
    mean = gathered_mean(reference, ids, weights)

On CUDA each call is one operation that reads every drawn image once, in its stored type, and never waits for the
device. `gathered_ops` has the operations and `gathered_kernels` their Triton kernels.
"""

import functools
import warnings

import torch
from torch import Tensor

from lit_knn.reference import gathered_ops
from lit_knn.reference.base import Reference
from lit_knn.reference.reference_set import ReferenceSet

# Images, draws and noise level of the trial of the kernels.
TRIAL_IMAGES, TRIAL_DRAWS, TRIAL_NOISE = 5, 3, 0.1
# Relative and absolute difference from PyTorch's results above which the kernels count as wrong.
TRIAL_ERROR = 1e-4


def gathered_sq_dist(
    reference: ReferenceSet, ids: Tensor, z: Tensor, used: Tensor | None = None, source: Tensor | None = None
) -> Tensor:
    """Compute ‖z − x‖² to the images of `ids`, as exactly as `theory.posterior.direct_sq_dist`.

    Args:
        reference: the set; the local part of a sharded one.
        ids: (B, n), below N. An id below 0 is no image: its distance is inf.
        z: (B, *shape), any float type, on the device of the set.
        used: (B,), number of used places of each row, which come first; None means all. Distances of other places are
            inf, and their images are not read.
        source: (B, *shape), float, one more image for each row, placed first; or None.

    Returns:
        (B, n), or (B, 1 + n) with a source; float64.
    """
    compute = torch.ops.lit_knn.gathered_sq_dist if fuses(reference) else gathered_ops.plain_sq_dist
    z = z.flatten(1)
    sq_dist = compute(_flat(reference), ids, used, z, _mirrored_width(reference))
    if source is None:
        return sq_dist
    rows = torch.arange(len(z), device=z.device).unsqueeze(1)
    return torch.cat([compute(source.flatten(1).float(), rows, None, z, 0), sq_dist], 1)


def gathered_mean(
    reference: ReferenceSet, ids: Tensor, weights: Tensor, used: Tensor | None = None, source: Tensor | None = None
) -> Tensor:
    """Compute Σ_i w_i x_i of the images of `ids`, as exactly as `theory.snis.weighted_mean`: (B, *shape), float64.

    Args:
        reference: the set; the local part of a sharded one.
        ids: (B, n), below N; at least one image per row, unless there is a source. Ids below 0 are left out.
        weights: (B, n), or (B, 1 + n) with a source; rows sum to 1.
        used: (B,), number of used places of each row, which come first; None means all. The others are not read.
        source: (B, *shape), float, one more image for each row, placed first; or None.
    """
    if ids.shape[1] == 0 and source is not None:
        return source.double()
    flat_source = None if source is None else source.flatten(1)
    arguments = _flat(reference), ids, used, weights, flat_source, _mirrored_width(reference)
    compute = torch.ops.lit_knn.gathered_mean if fuses(reference) else gathered_ops.plain_mean
    return compute(*arguments).reshape(len(ids), *reference.shape)


def fuses(reference: Reference) -> bool:
    """Tells whether the operations above read the images of this set in place: on CUDA, if Triton's kernels work.

    The first call for a kind of images on a device tries the kernels on a few random images and compares them with
    PyTorch. If they fail or differ, a warning says so, and PyTorch gathers the images.
    """
    local = reference.local
    if local.device.type != "cuda":
        return False
    # Sources of z are floats, also beside pixels.
    kinds = (local.images.dtype, local.hflip), (torch.float32, False)
    return all(_kernels_work(local.device, dtype, local.shape, hflip) for dtype, hflip in kinds)


@functools.cache
def _kernels_work(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], hflip: bool) -> bool:
    """Try the kernels on random images of one kind, once per process. Warns if they cannot be used."""
    if not gathered_ops.has_triton():
        warnings.warn(f"Triton is not installed: PyTorch gathers the drawn images on {device}, slower", stacklevel=3)
        return False
    try:
        wrong = _trial(device, dtype, shape, hflip)
    except Exception as error:  # Triton, its compiler and the driver raise errors of many types.
        wrong = f"failed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if wrong:
        warnings.warn(f"Triton's kernels {wrong}: PyTorch gathers the drawn images on {device}, slower", stacklevel=3)
    return not wrong


def _trial(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], hflip: bool) -> str:
    """Compare both operations with PyTorch's results. Returns what is wrong, or an empty text."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    images = random(TRIAL_IMAGES, *shape).flatten(1)
    images = (255 * images).to(dtype) if dtype == torch.uint8 else images
    width, ids = shape[-1] if hflip else 0, torch.arange(TRIAL_DRAWS * 2, device=device).view(2, -1)
    ids = ids if hflip else ids % TRIAL_IMAGES
    used = torch.tensor([TRIAL_DRAWS, TRIAL_DRAWS - 1], device=device)
    source = random(2, images.shape[1])
    weights = torch.softmax(random(2, 1 + TRIAL_DRAWS).double(), 1)
    z = source + TRIAL_NOISE * random(2, images.shape[1])
    for name, fused, plain, arguments in (
        ("wrong distances", torch.ops.lit_knn.gathered_sq_dist, gathered_ops.plain_sq_dist, (z, width)),
        ("a wrong mean", torch.ops.lit_knn.gathered_mean, gathered_ops.plain_mean, (weights, source, width)),
    ):
        got, wanted = fused(images, ids, used, *arguments), plain(images, ids, used, *arguments)
        if not torch.allclose(got, wanted, rtol=TRIAL_ERROR, atol=TRIAL_ERROR):
            return f"give {name}"
    return ""


def _flat(reference: ReferenceSet) -> Tensor:
    """Return the stored images as (N, d), contiguous. Images that are not are copied once."""
    stored = reference.rows(slice(None))
    if stored.is_contiguous():
        return stored.flatten(1)
    return reference.cached("contiguous images", lambda: stored.flatten(1).contiguous())


def _mirrored_width(reference: ReferenceSet) -> int:
    return reference.shape[-1] if reference.hflip else 0
