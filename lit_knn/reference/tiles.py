"""The first principal components of all images in tiles, for products whose results are used tile by tile."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.linalg.pca import Projection
from lit_knn.theory.blocked_draws import BLOCK

# Images per tile: the arrays of a tile stay in the CPU's cache during all passes over them.
TILE = 8192
# The leading components are one in so many. They hold most of the variance.
LEADING = 4


class Coarse(NamedTuple):
    """The first components of all images, in tiles for products with the rows of a batch.

    Attributes:
        tiles: (T, coarse + 2, c), float32. A column is an image: its leading components, −‖y‖²/2 of them, its other
            components, and −‖y‖²/2 of all. Columns beyond the N images have −1e30 in place of norms.
        leading: number of leading components.
        largest: largest ‖y‖, a scalar.
        outside: variance of the images outside the leading components, and outside all of them.
    """

    tiles: Tensor
    leading: int
    largest: Tensor
    outside: tuple[float, float]

    def query(self, y: Tensor, noise: Tensor, all_components: bool) -> Tensor:
        """Return the factors of the tiles' first rows that give log q: (b, rows), float32."""
        one = torch.ones_like(noise)
        parts = [y[:, : self.leading], one]
        if all_components:
            parts = [parts[0], torch.zeros_like(one), y[:, self.leading : self.tiles.shape[1] - 2], one]
        return torch.cat(parts, 1) / noise


def tiling(N: int) -> tuple[int, int]:
    """Return the number of tiles and the images per tile."""
    T = -(-N // TILE)
    return T, -(-N // (T * BLOCK)) * BLOCK


def tiles_of(projection: Projection, r: int) -> Coarse:
    """Copy the first r components of all images to tiles."""
    coordinates, components, leading = projection.coordinates, projection.components, max(r // LEADING, 1)
    T, c = tiling(len(coordinates))
    tiles = torch.zeros(T, r + 2, c, device=coordinates.device)
    tiles[:, leading] = tiles[:, r + 1] = -1e30
    largest = torch.zeros((), device=coordinates.device)
    for tile, part in zip(tiles, coordinates.split(c), strict=True):
        own, square = tile[:, : len(part)], part[:, :r].float().square()
        own[:leading], own[leading + 1 : -1] = part[:, :leading].T, part[:, leading:r].T
        own[leading], own[-1] = square[:, :leading].sum(1) / -2, square.sum(1) / -2
        largest = torch.maximum(largest, square.sum(1).max().sqrt())
    d, known = len(components.mean), components.variances.double()
    beyond = components.residual_variance * (d - len(known))
    outside = known[leading:].sum().item() + beyond, known[r:].sum().item() + beyond
    return Coarse(tiles, leading, largest, outside)
