"""The equivariant local score: the posterior over patches of all positions."""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.estimators.patches import PatchEstimator, chunks_with_images_last, images_last
from lit_knn.estimators.running_mean import RunningMean, keys_of, values_of


class Windows(NamedTuple):
    """Windows along one axis that are compared with each other.

    Attributes:
        starts: first pixels of the windows.
        extent: pixels of a window.
        centres: pixels that a window estimates, counted from its start.
    """

    starts: range
    extent: int
    centres: range


class EquivariantPatch(PatchEstimator):
    """The equivariant local score: each pixel's posterior over the patches around all pixels of all images.

    The pixel is the mean of the patches' centre pixels, weighted by softmax(−‖z_w − x_w'‖²/2t²) over images and
    windows w' (Kamb and Ganguli 2024, arXiv 2412.20292). It is the best estimator that sees p×p pixels and commutes
    with shifts. Borders are treated as a network with zero padding sees them: padding is noiseless, so a window that
    overlaps a border is compared only with windows of the same overlap, on the pixels inside (their "boundary-broken"
    variant). Such pixels know their distance to that border; pixels in the corners know their position.

    If p >= 2·max(H, W) − 1, each pixel sees the whole image, and the mean is that of `Exact`. The cost is that of
    (H − p + 1)·(W − p + 1) estimates of N·(H − p + 1)·(W − p + 1) patches per z. It is deterministic.

    Args:
        size: edge p of the windows in pixels, odd; or a table {noise level: edge}, of which the level nearest in log t
            counts; null for a table that `bind` computes from the covariance (`theory.filter_extent`).

    Raises:
        InputError: size below 1 or even, a level that is not above 0; at `bind`, a size above 2·max(H, W) − 1, or
            data that are not images (C, H, W).
    """

    deterministic = True
    odd = True

    def __init__(self, size: int | dict[float, int] | None = None) -> None:
        super().__init__(size)

    def _largest(self, height: int, width: int) -> int:
        return 2 * max(height, width) - 1

    def _state_floats(self, size: int) -> int:
        """Number of float64 values per item, for the largest kind of window."""
        kinds = self._kinds(size)
        return max(2 * len(r.starts) * len(c.starts) * r.extent * c.extent for r, c in kinds) * self.reference.shape[0]

    def _mean_at(self, z: Tensor, t: Tensor, size: int) -> Tensor:
        mean = torch.empty_like(z, dtype=torch.float64)
        for rows, columns in self._kinds(size):
            self._estimate(mean, z, t, rows, columns)
        return mean

    def _kinds(self, size: int) -> list[tuple[Windows, Windows]]:
        _, height, width = self.reference.shape
        return list(product(windows_of(height, size), windows_of(width, size)))

    def _estimate(self, mean: Tensor, z: Tensor, t: Tensor, rows: Windows, columns: Windows) -> None:
        """Write the pixels of one kind of windows into `mean`."""
        channels, count = z.shape[1], len(rows.starts) * len(columns.starts)
        centres = (len(rows.centres), len(columns.centres))
        values = centres[0] * centres[1] * channels
        K = rows.extent * columns.extent * channels

        def joined(made: Tensor) -> Tensor:
            """(starts, K, n) -> (1, K, starts·n): the windows of all positions are keys of one group."""
            return made.transpose(0, 1).flatten(1).unsqueeze(0)

        queries = _windows(images_last(z.double()), rows, columns)
        state = RunningMean(joined(queries.flatten(1, 3)).mT, t.repeat(count), values)
        for x in chunks_with_images_last(self.reference, 2 * count * (K + values)):
            patches = _windows(x, rows, columns)
            inside = patches[:, _slice(rows.centres), _slice(columns.centres)]
            state.add(joined(keys_of(patches)).contiguous(), joined(values_of(inside)).contiguous())
        found = state.mean().reshape(len(rows.starts), len(columns.starts), len(z), *centres, channels)
        for (i, top), (j, left) in product(enumerate(rows.starts), enumerate(columns.starts)):
            at_rows, at_columns = _slice(rows.centres, top), _slice(columns.centres, left)
            mean[:, :, at_rows, at_columns] = found[i, j].movedim(3, 1)


def windows_of(length: int, size: int) -> list[Windows]:
    """Sort the pixels of an axis by the overlap of their windows with its borders.

    Pixels without overlap share one kind, because their windows may stand anywhere. Every other overlap belongs to one
    pixel. Pixels whose windows hold the same pixels of the image share the comparison.
    """
    radius = size // 2
    kinds = [Windows(range(length - size + 1), size, range(radius, radius + 1))] if length >= size else []
    cut: dict[tuple[int, int], list[int]] = {}
    for pixel in range(length):
        if pixel < radius or pixel >= length - radius:
            cut.setdefault((max(pixel - radius, 0), min(pixel + radius + 1, length)), []).append(pixel)
    for (start, end), pixels in cut.items():
        kinds.append(Windows(range(start, start + 1), end - start, range(pixels[0] - start, pixels[-1] - start + 1)))
    return kinds


def _windows(images: Tensor, rows: Windows, columns: Windows) -> Tensor:
    """Cut (H, W, C, n) into windows (starts, h, w, C, n)."""
    return torch.stack(
        [
            images[top : top + rows.extent, left : left + columns.extent]
            for top, left in product(rows.starts, columns.starts)
        ]
    )


def _slice(pixels: range, start: int = 0) -> slice:
    return slice(start + pixels.start, start + pixels.stop)
