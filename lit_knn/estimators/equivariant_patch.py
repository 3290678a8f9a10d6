"""The equivariant local score: the posterior over patches of all positions."""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.estimators.patches import PatchEstimator, chunks_with_images_last, images_last
from lit_knn.estimators.running_mean import (
    Rounding,
    RunningMean,
    RunningSoftmax,
    keys_of,
    values_of,
)
from lit_knn.estimators.window_sums import scaled_latents, sliding_sums, with_half_squares
from lit_knn.reference.streaming import work_bytes

# A product with rows of pixels has `work_bytes` / KEY_BYTES windows side by side: 128 on a CPU.
KEY_BYTES = 2**17
# Arrays of products that fit `work_bytes` together. Then a few of them stay in the cache of a CPU.
PIECES = 8


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

    @property
    def pixels(self) -> range:
        """Pixels of the axis that these windows estimate: one of `starts` and `centres` has one element."""
        first, last = self.starts[0] + self.centres[0], self.starts[-1] + self.centres[-1]
        return range(first, last + 1)


class Kind(NamedTuple):
    """Windows of an image with the same overlap with its borders. They are compared with each other."""

    rows: Windows
    columns: Windows

    @property
    def places(self) -> int:
        """Number of windows in an image."""
        return len(self.rows.starts) * len(self.columns.starts)

    def features(self, channels: int) -> int:
        """Return the number of values of a window."""
        return self.rows.extent * self.columns.extent * channels

    def values(self, channels: int) -> int:
        """Return the number of values that a window estimates."""
        return len(self.rows.centres) * len(self.columns.centres) * channels

    def start(self, z: Tensor, t: Tensor, rounding: Rounding) -> RunningSoftmax:
        """Start the mean for each window of z (H, W, C, B): one group, because all positions share the keys."""
        channels = z.shape[2]
        queries = self._windows(z).flatten(3).flatten(0, 2).mT.unsqueeze(0)
        dtype = rounding.dtype(self.features(channels))
        return RunningMean(queries, t.repeat(self.places), self.values(channels), dtype)

    def add(self, state: RunningSoftmax, x: Tensor) -> None:
        """Add the windows of images (H, W, C, n)."""
        assert isinstance(state, RunningMean)
        channels = x.shape[2]
        K, V = self.features(channels), self.values(channels)
        step = max(work_bytes(x.device) // (16 * self.places * (K + V)), 1)
        for part in x.split(step, dim=3):
            windows = self._windows(part)
            inside = windows[_slice(self.rows.centres), _slice(self.columns.centres)]
            state.add(keys_of(windows.unsqueeze(0), K, state.queries.dtype), values_of(inside.unsqueeze(0), V))

    def write(self, state: RunningSoftmax, mean: Tensor) -> None:
        """Write the estimated pixels into `mean` (B, C, H, W)."""
        target = mean[:, :, _slice(self.rows.pixels), _slice(self.columns.pixels)]
        starts, centres = ([len(getattr(axis, name)) for axis in self] for name in ("starts", "centres"))
        found = state.mean().reshape(*starts, len(mean), *centres, mean.shape[1])
        target.copy_(found.permute(2, 5, 0, 3, 1, 4).reshape(target.shape))

    def _windows(self, images: Tensor) -> Tensor:
        """View images (H, W, C, n) as windows (h, w, C, rows' starts, columns' starts, n)."""
        for axis, own in enumerate(self):
            span = len(own.starts) + own.extent - 1
            images = images.narrow(axis, own.starts.start, span).unfold(axis, own.extent, 1)
        return images.permute(4, 5, 2, 0, 1, 3)


class Inside(Kind):
    """The windows inside an image. They may stand anywhere, and each is compared with each.

    The product of two windows is a sum over p rows of pixels, and the windows one row below share p − 1 of them. So
    rows are multiplied, C·p products in place of C·p², and added over p rows (`sliding_sums`). Windows of z and x share
    rows where their vertical distance is the same: one distance is treated at a time.
    """

    def start(self, z: Tensor, t: Tensor, rounding: Rounding) -> "InsideMean":
        """Start the mean for each window of z (H, W, C, B): a group for each row of windows."""
        channels = z.shape[2]
        products = rounding.dtype(self.columns.extent * channels, self.rows.extent)
        queries = self._rows(scaled_latents(z, t, products)).mT.contiguous()
        return InsideMean(queries, self, channels, rounding.dtype(self.features(channels)))

    def add(self, state: RunningSoftmax, x: Tensor) -> None:
        """Add the windows of images (H, W, C, n)."""
        assert isinstance(state, InsideMean)
        for part in x.split(max(work_bytes(x.device) // (KEY_BYTES * len(self.columns.starts)), 1), dim=3):
            keys = self._rows(with_half_squares(part, state.queries.dtype))
            inside = part[_slice(self.rows.pixels), _slice(self.columns.pixels)].transpose(1, 2).flatten(2)
            state.add_rows(keys, torch.cat([inside, torch.ones_like(inside[:, :1])], 1))

    def _rows(self, images: Tensor) -> Tensor:
        """Copy the rows of pixels of all windows of images (H, W, C, n): (H, p·C, windows side by side · n)."""
        return images.unfold(1, self.columns.extent, 1).permute(0, 4, 2, 1, 3).flatten(3).flatten(1, 2)


class InsideMean(RunningSoftmax):
    """The means of the windows inside the images.

    Args:
        queries: (H, Q, K), the rows of pixels of z; Q windows stand side by side.
        kind: the windows.
        channels: values of a window's centre.
        dtype: type of the log weights. Products of single rows may have fewer digits.
    """

    def __init__(self, queries: Tensor, kind: Kind, channels: int, dtype: torch.dtype) -> None:
        self.queries, self.size, self.tops = queries, kind.rows.extent, len(kind.rows.starts)
        super().__init__((self.tops, queries.shape[1]), channels, dtype, queries.device)

    def add_rows(self, keys: Tensor, values: Tensor) -> None:
        """Add images.

        Args:
            keys: (H, K, n), the rows of pixels of x; n windows stand side by side.
            values: (rows of windows, C + 1, n), the centres of the windows and 1.
        """
        step = max(work_bytes(keys.device) // (PIECES * 8 * len(keys) * keys.shape[2]), 1)
        for first in range(0, self.queries.shape[1], step):
            own = slice(first, first + step)
            for down in range(1 - self.tops, self.tops):
                # The windows of z whose partners `down` pixels below are inside the image, and their pixels.
                tops = slice(max(-down, 0), self.tops - max(down, 0))
                pixels = slice(tops.start, tops.stop + self.size - 1)
                products = torch.bmm(self.queries[pixels, own], keys[_moved(pixels, down)]).to(self.maximum.dtype)
                self.add_log_weights(sliding_sums(products, self.size), values[_moved(tops, down)], tops, own)


class EquivariantPatch(PatchEstimator):
    """The equivariant local score: each pixel's posterior over the patches around all pixels of all images.

    The pixel is the mean of the patches' centre pixels, weighted by softmax(−‖z_w − x_w'‖²/2t²) over images and
    windows w' (Kamb and Ganguli 2024, arXiv 2412.20292). It is the best estimator that sees p×p pixels and commutes
    with shifts. Borders are treated as a network with zero padding sees them: padding is noiseless, so a window that
    overlaps a border is compared only with windows of the same overlap, on the pixels inside (their "boundary-broken"
    variant). Such pixels know their distance to that border; pixels in the corners know their position.

    If p >= 2·max(H, W) − 1, each pixel sees the whole image, and the mean is that of `Exact`. The cost is that of
    N·(H − p + 1)²·(W − p + 1)² log weights per z, each with C·p products and about 2·log₂ p additions. It is
    deterministic.

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
        kinds, channels = self._kinds(size), self.reference.shape[0]
        return sum(2 * kind.places * (kind.features(channels) + kind.values(channels) + 2) for kind in kinds)

    def _mean_at(self, z: Tensor, t: Tensor, size: int) -> Tensor:
        kinds = self._kinds(size)
        own, rounding = images_last(z.double()), Rounding(self.reference, z, t.min())
        states = [kind.start(own, t, rounding) for kind in kinds]
        for x in chunks_with_images_last(self.reference, 2 * self.reference.d):
            for kind, state in zip(kinds, states, strict=True):
                kind.add(state, x)
        mean = torch.empty_like(z, dtype=torch.float64)
        for kind, state in zip(kinds, states, strict=True):
            kind.write(state, mean)
        return mean

    def _kinds(self, size: int) -> list["Kind"]:
        _, height, width = self.reference.shape
        pairs = product(windows_of(height, size), windows_of(width, size))
        return [Inside(*axes) if all(axis.extent == size for axis in axes) else Kind(*axes) for axes in pairs]


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


def _slice(pixels: range) -> slice:
    return slice(pixels.start, pixels.stop)


def _moved(pixels: slice, down: int) -> slice:
    return slice(pixels.start + down, pixels.stop + down)
