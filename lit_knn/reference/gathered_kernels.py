"""Triton kernels that read gathered images in their stored type and keep no copy of them.

They compute what `gathered_ops` computes with PyTorch, and read each drawn image once per call. Import this file only
where Triton is installed.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

# Places and columns of a tile, by type of the images. A thread loads 16 bytes at once, and registers hold the tile.
SQ_DIST_TILES = {
    torch.uint8: {"PLACES": 16, "COLUMNS": 256, "num_warps": 4},
    torch.float32: {"PLACES": 16, "COLUMNS": 128, "num_warps": 4},
}
MEAN_TILES = {
    torch.uint8: {"PLACES": 8, "COLUMNS": 256, "num_warps": 1},
    torch.float32: {"PLACES": 8, "COLUMNS": 256, "num_warps": 1},
}
# A fused multiply-add would round p / 127.5 − 1 differently from `to_model_space`.
EXACT = {"enable_fp_fusion": False}
# These sizes change from call to call, and the code does not depend on them.
CHANGING = ["n", "stored", "width"]


@triton.jit
def _decoded(stored_values, PIXELS: tl.constexpr):
    """Map stored values to model space. On CUDA, PyTorch divides by a number in the same way."""
    x = stored_values.to(tl.float32)
    if PIXELS:
        x = x * (1 / 127.5) - 1.0
    return x


@triton.jit(do_not_specialize=CHANGING)
def _sq_dist(
    images, ids, used, z, out, n, d, stored, width,
    PIXELS: tl.constexpr, MIRRORED: tl.constexpr, COUNTED: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[b, i] = ‖z[b] − x[ids[b, i]]‖²; inf where the place is unused or the id is below 0."""
    # One axis of programs, because a second one could not hold the tiles of a million places.
    tiles = tl.cdiv(n, PLACES)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * PLACES
    place = first + tl.arange(0, PLACES)
    count = n
    if COUNTED:
        count = tl.minimum(tl.load(used + b).to(tl.int32), n)
    row = tl.load(ids + b * n + place, mask=place < count, other=-1).to(tl.int64)
    there = row >= 0
    mirrored = row >= stored
    base = tl.where(mirrored, row - stored, row) * d
    total = tl.zeros((PLACES,), tl.float64)
    # A tile without used places reads nothing.
    for start in range(0, tl.where(first < count, d, 0), COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = there[:, None] & (j < d)[None, :]
        x = _decoded(tl.load(images + base[:, None] + j[None, :], mask=inside, other=0), PIXELS)
        point = tl.load(z + b * d + j, mask=j < d, other=0.0)[None, :]
        if MIRRORED:
            # ‖z − mirror(x)‖ = ‖mirror(z) − x‖, so that images are read in their order.
            mirror = j // width * width + (width - 1 - j % width)
            point = tl.where(mirrored[:, None], tl.load(z + b * d + mirror, mask=j < d, other=0.0)[None, :], point)
        if point.dtype == tl.float64:
            x = x.to(tl.float64)
        else:
            point = point.to(tl.float32)
        difference = tl.where(inside, x - point, 0.0)
        # float32 sums the terms of a tile, float64 the tiles: every weight depends on this sum.
        total += tl.sum(difference * difference, axis=1).to(tl.float64)
    tl.store(out + b * n + place, tl.where(there, total, float("inf")), mask=place < n)


@triton.jit(do_not_specialize=CHANGING)
def _mean(
    images, ids, used, weights, source, heaviest, out, n, d, stored, width,
    PIXELS: tl.constexpr, MIRRORED: tl.constexpr, COUNTED: tl.constexpr, SOURCE: tl.constexpr,
    PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[0, b] + out[1, b] = c + Σ_i w[b, i] (x[ids[b, i]] − c), where c is the image at place heaviest[b].

    With SOURCE, place 0 is the image source[b], and weights have one more column. out[1] exists only if MIRRORED.
    """
    b = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = j < d
    mirror = j
    if MIRRORED:
        mirror = j // width * width + (width - 1 - j % width)
    weights += b * (n + SOURCE)
    place = tl.load(heaviest + b)
    nearest = tl.maximum(tl.load(ids + b * n + tl.maximum(place - SOURCE, 0)).to(tl.int64), 0)
    turn = nearest >= stored
    nearest = images + tl.where(turn, nearest - stored, nearest) * d
    centre = _decoded(tl.load(nearest + tl.where(turn, mirror, j), mask=inside, other=0), PIXELS)
    mirrored_centre = centre
    if MIRRORED:
        mirrored_centre = _decoded(tl.load(nearest + tl.where(turn, j, mirror), mask=inside, other=0), PIXELS)
    total = tl.zeros((COLUMNS,), tl.float64)
    if SOURCE:
        own = tl.load(source + b * d + j, mask=inside, other=0.0)
        centre = tl.where(place == 0, own, centre)
        if MIRRORED:
            turned = tl.load(source + b * d + mirror, mask=inside, other=0.0)
            mirrored_centre = tl.where(place == 0, turned, mirrored_centre)
        total += (tl.load(weights).to(tl.float32) * (own - centre)).to(tl.float64)
    mirrored_total = tl.zeros((COLUMNS,), tl.float64)
    count = n
    if COUNTED:
        count = tl.minimum(tl.load(used + b).to(tl.int32), n)
    for start in range(0, count, PLACES):
        i = start + tl.arange(0, PLACES)
        row = tl.load(ids + b * n + i, mask=i < count, other=-1).to(tl.int64)
        there = row >= 0
        weight = tl.load(weights + SOURCE + i, mask=there, other=0.0).to(tl.float32)[:, None]
        mirrored = row >= stored
        base = tl.where(mirrored, row - stored, row) * d
        mask = there[:, None] & inside[None, :]
        x = _decoded(tl.load(images + base[:, None] + j[None, :], mask=mask, other=0), PIXELS)
        if MIRRORED:
            # A sum of mirrored images is the mirrored sum, so that images are read in their order.
            terms = weight * (x - tl.where(mirrored[:, None], mirrored_centre[None, :], centre[None, :]))
            total += tl.sum(tl.where(mirrored[:, None], 0.0, terms), axis=0).to(tl.float64)
            mirrored_total += tl.sum(tl.where(mirrored[:, None], terms, 0.0), axis=0).to(tl.float64)
        else:
            total += tl.sum(weight * (x - centre[None, :]), axis=0).to(tl.float64)
    tl.store(out + b * d + j, centre.to(tl.float64) + total, mask=inside)
    if MIRRORED:
        tl.store(out + (tl.num_programs(0) + b) * d + mirror, mirrored_total, mask=inside)


def sq_dist(images: Tensor, ids: Tensor, used: Tensor | None, z: Tensor, width: int) -> Tensor:
    """Launch the kernel of `gathered_ops.sq_dist`; the arguments are the same."""
    (B, n), d = ids.shape, images.shape[1]
    out = torch.empty(B, n, dtype=torch.float64, device=images.device)
    tile = SQ_DIST_TILES[images.dtype]
    if out.numel():
        grid = (B * triton.cdiv(n, tile["PLACES"]),)
        ids = ids.contiguous()
        counts = ids if used is None else used.contiguous()
        kinds = {"PIXELS": images.dtype == torch.uint8, "MIRRORED": width > 0, "COUNTED": used is not None}
        images = images.contiguous()
        with _on(images):
            _sq_dist[grid](images, ids, counts, z.contiguous(), out, n, d, len(images), width, **kinds, **tile, **EXACT)
    return out


def mean(
    images: Tensor, ids: Tensor, used: Tensor | None, weights: Tensor, source: Tensor | None, width: int
) -> Tensor:
    """Launch the kernel of `gathered_ops.mean`; the arguments are the same."""
    (B, n), d = ids.shape, images.shape[1]
    out = torch.empty(2 if width else 1, B, d, dtype=torch.float64, device=images.device)
    tile = MEAN_TILES[images.dtype]
    if B:
        grid = (B, triton.cdiv(d, tile["COLUMNS"]))
        ids = ids.contiguous()
        counts = ids if used is None else used.contiguous()
        x = images if source is None else source.float().contiguous()
        kinds = {"PIXELS": images.dtype == torch.uint8, "MIRRORED": width > 0, "COUNTED": used is not None}
        kinds["SOURCE"] = source is not None
        images = images.contiguous()
        with _on(images):
            _mean[grid](
                images, ids, counts, weights.contiguous(), x, weights.argmax(1), out, n, d, len(images), width,
                **kinds, **tile, **EXACT,
            )  # fmt: skip
    return out.sum(0) if width else out[0]


def _on(images: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, so make it that of the images."""
    return torch.cuda.device(images.device) if images.is_cuda else nullcontext()
