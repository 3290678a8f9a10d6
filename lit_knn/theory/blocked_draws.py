"""Optimal resampling from a distribution over very many images, with few passes over their probabilities.

`stratified_draws` sorts and accumulates all N probabilities of a row. Here they stay in tiles, as a product left them.
Only sums over blocks of `BLOCK` images are sorted and accumulated, and only drawn blocks are read again.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.theory.stratified import exp_relative

# Images per block. It divides the width of a tile.
BLOCK = 16


class TiledMass(NamedTuple):
    """An unnormalised distribution over T·c images for each of b rows, in T tiles of c images.

    Attributes:
        mass: (T, b, c), float32, relative to the largest value of the row in its tile.
        sums: (T, b, c / BLOCK), float32, their sums over blocks.
        scale: (T, b), float64, at most 1. The mass of an image is `mass` times `scale`.
    """

    mass: Tensor
    sums: Tensor
    scale: Tensor

    def block_mass(self) -> Tensor:
        """Return the mass of each block, (b, blocks), float64, in the order of the images."""
        return (self.sums * self.scale.unsqueeze(2)).transpose(0, 1).flatten(1)

    def places(self, blocks: Tensor) -> Tensor:
        """Return where some blocks (b, p) are among all rows of BLOCK numbers in `mass`, (b, p)."""
        _, b, width = self.sums.shape
        row = torch.arange(b, device=blocks.device).unsqueeze(1)
        return (blocks // width * b + row) * width + blocks % width

    def of(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return `mass` of the images of some blocks (b, p), (b, p, BLOCK) float32, and their scales, (b, p, 1)."""
        # A selection of rows is much faster than one of single numbers.
        mass = self.mass.view(-1, BLOCK).index_select(0, self.places(blocks).flatten())
        return mass.view(*blocks.shape, BLOCK), self.scale.T.gather(1, blocks // self.sums.shape[2]).unsqueeze(2)


class BlockedDraws(NamedTuple):
    """Images drawn from a `TiledMass`. The columns of a row that are neither kept nor sampled are unused.

    Attributes:
        ids: (b, K + s). The kept images come first.
        log_correction: (b, K + s), float64, log(base weight / mass) up to a constant per row; −inf at unused places.
        mass: (b, K + s), float64, mass of each image.
        kept: (b, K + s), bool, whether the image is kept.
        sampled: (b, K + s), bool, whether the image was drawn from the rest.
        rest: (b,), float64, share of the images that are not kept.
        total: (b,), float64, mass of all images.
    """

    ids: Tensor
    log_correction: Tensor
    mass: Tensor
    kept: Tensor
    sampled: Tensor
    rest: Tensor
    total: Tensor


def tiled_mass(log_mass: Callable[[int, Tensor], object], mass: Tensor) -> TiledMass:
    """Compute a `TiledMass` tile by tile.

    Args:
        log_mass: writes the log-probabilities of tile i, up to a constant per row, to an array (b, c).
        mass: (T, b, c), float32, is overwritten.
    """
    tiles, b, c = mass.shape
    device = mass.device
    largest = torch.empty(tiles, b, device=device)
    sums, ones = torch.empty(tiles, b, c // BLOCK, device=device), torch.ones(BLOCK, device=device)
    for i, part in enumerate(mass):
        log_mass(i, part)
        largest[i] = part.amax(1)
        exp_relative(part, largest[i].unsqueeze(1))
        # A product with ones is the fastest sum over few neighbours.
        torch.mv(part.view(-1, BLOCK), ones, out=sums[i].view(-1))
    return TiledMass(mass, sums, (largest.double() - largest.amax(0)).exp_())


def blocked_draws(
    tiled: TiledMass, keep: int, s: int, log_negligible: Tensor, generator: torch.Generator | None = None
) -> BlockedDraws:
    """Keep up to `keep` of the most probable images and draw s of the rest, like `stratified_draws`.

    The kept images are those that `keep` + s draws without repetition are sure to contain, among the `keep` most
    probable ones in the `keep` most probable blocks. If they hold all but a negligible part, nothing is drawn. If more
    images than these are sure, some are drawn repeatedly.

    Args:
        tiled: the distribution. The mass of kept images is set to 0.
        keep: most images kept, at most the number of blocks.
        s: number of draws.
        log_negligible: (b,), log of the share that may be left out.
        generator: on the device of `tiled`.
    """
    block_mass = tiled.block_mass()
    total = block_mass.sum(1, keepdim=True)
    blocks = block_mass.topk(keep, dim=1)[1]
    relative, scale = tiled.of(blocks)
    mass = (relative * scale).flatten(1)
    top, order = mass.topk(keep, dim=1)
    # Sum what is left after each place from its small end, because differences of sums would round it.
    block_mass.scatter_(1, blocks, 0.0)
    outside = block_mass.sum(1, keepdim=True) + mass.scatter(1, order, 0.0).sum(1, keepdim=True)
    later = torch.cat([top, outside], 1).flip(1).cumsum(1).flip(1)
    enough = later[:, 1:] <= total * log_negligible.exp().unsqueeze(1)
    number = torch.arange(keep, device=top.device)
    places_left = keep + s - number
    sure = (top * places_left >= later[:, :-1]).cumprod(1).bool()
    # Before the first place that leaves only a negligible rest, every place is needed.
    needed = torch.cat([torch.ones_like(enough[:, :1]), ~enough[:, :-1]], 1).cumprod(1).bool()
    covered = enough.any(1, keepdim=True)
    kept = torch.where(covered, needed, sure)
    block, offset = blocks.gather(1, order // BLOCK), order % BLOCK
    values, flat = tiled.mass.view(-1), tiled.places(block) * BLOCK + offset
    values[flat] = values[flat].masked_fill_(kept, 0.0)
    relative, scale = tiled.of(blocks)
    block_mass.scatter_(1, blocks, (relative * scale).sum(2))
    ids, drawn, rest = _systematic(tiled, block_mass, s, generator)
    sampled = (drawn > 0) & ~covered
    base = (rest / s).log().unsqueeze(1)
    log_correction = torch.cat([torch.zeros_like(top), base - drawn.log()], 1)
    kept, sampled = torch.cat([kept, torch.zeros_like(sampled)], 1), torch.cat([torch.zeros_like(kept), sampled], 1)
    return BlockedDraws(
        torch.cat([block * BLOCK + offset, ids], 1),
        log_correction.masked_fill_(~(kept | sampled), -math.inf),
        torch.cat([top, drawn], 1),
        kept,
        sampled,
        rest / total.squeeze(1),
        total.squeeze(1),
    )


def _systematic(
    tiled: TiledMass, block_mass: Tensor, s: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw s images per row, evenly spaced on the cumulated mass: their ids and masses (b, s), and the total mass (b,).

    A draw that rounding moves to an image without mass has mass 0.
    """
    cdf = block_mass.cumsum(1)
    u = torch.rand(len(cdf), 1, dtype=torch.float64, device=cdf.device, generator=generator)
    heights = (u + torch.arange(s, device=cdf.device)) * (cdf[:, -1:] / s)
    blocks = torch.searchsorted(cdf, heights, right=True).clamp_(max=cdf.shape[1] - 1)
    mass, scale = tiled.of(blocks)
    within = (heights - (cdf.gather(1, blocks) - block_mass.gather(1, blocks))).unsqueeze(2) / scale
    # Float32 suffices within a block. A comparison with float64 would copy all masses.
    offset = torch.searchsorted(mass.cumsum(2), within.float(), right=True).clamp_(max=BLOCK - 1)
    return blocks * BLOCK + offset.squeeze(2), (mass.gather(2, offset) * scale).squeeze(2), cdf[:, -1]
