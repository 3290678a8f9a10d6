"""The posterior over patches at the same position, recombined by averaging."""

from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.counts import check_count
from lit_knn.estimators.patches import PatchEstimator, chunks_with_images_last, images_last
from lit_knn.estimators.running_mean import Rounding, RunningSoftmax, weights_of
from lit_knn.estimators.window_sums import scaled_latents, sliding_sums, with_half_squares
from lit_knn.reference import Reference

Axis = list[int]

# Latents of one pass over the images. With more of them, few images fit the cache at a time.
ITEMS = 128


class _Windows:
    """The windows of some latents, one column of them at a time.

    Args:
        queries: (H, W, C + 1, B), see `scaled_latents`.
        rows: first rows of the windows.
        h: rows of a window.
        w: columns of a window.
    """

    def __init__(self, queries: Tensor, rows: Axis, h: int, w: int) -> None:
        self.queries, self.rows, self.h, self.w = queries, rows, h, w
        self.all_rows = len(rows) == len(queries) - h + 1

    def log_weights(self, keys: Tensor, left: int) -> Tensor:
        """Compute the log weights of images (H, W, C + 1, n) in the windows with the first column `left`: (R, B, n).

        Each row of pixels is one product, which up to h windows share.
        """
        queries, own = (images[:, left : left + self.w].flatten(1, 2) for images in (self.queries, keys))
        sums = sliding_sums(torch.bmm(queries.mT, own), self.h)
        return sums if self.all_rows else sums[self.rows]

    def over_pixels(self, weights: Tensor) -> Tensor:
        """Sum weights (R, B, n) over the windows that hold each row of pixels: (H, B, n)."""
        padded = weights.new_zeros(len(self.queries) + self.h - 1, *weights.shape[1:])
        if self.all_rows:
            padded[self.h - 1 : self.h - 1 + len(weights)] = weights
        else:
            padded[[self.h - 1 + row for row in self.rows]] = weights
        return sliding_sums(padded, self.h)


class PatchPosterior(PatchEstimator):
    """PSPC: the posterior mean of each patch of z over the images' patches at the same position.

    Each p×p window of z has its own posterior over the N images, softmax(−‖z_w − x_w‖²/2t²). Windows overlap, and each
    pixel is the average of the posterior means of the windows that hold it (Niedoba et al. 2024, arXiv 2411.19339). A
    window of the whole image gives `Exact`. It reads the images twice. The cost is that of about 3·N·C·p products and
    6·N·log₂ p additions per window. It is deterministic.

    Args:
        size: edge p of the windows in pixels; or a table {noise level: edge}, of which the level nearest in log t
            counts; null for a table that `bind` computes from the covariance (`theory.filter_extent`). An edge
            between H and W is cut to the shorter side.
        stride: distance between windows in pixels. The last window of an axis ends at its border.

    Raises:
        InputError: size or stride below 1, a level that is not above 0; at `bind`, a size above max(H, W), a stride
            above a size (it would leave pixels out), or data that are not images (C, H, W).
    """

    deterministic = True

    def __init__(self, size: int | dict[float, int] | None = None, stride: int = 1) -> None:
        super().__init__(size)
        self.stride = check_count("PatchPosterior", "stride", stride)

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Computes the sizes if none are given."""
        super().bind(reference)
        least = min(self._table.values())
        if self.stride > least:
            raise InputError(f"PatchPosterior: stride={self.stride} is more than size={least}: it leaves pixels out")
        return self

    def _largest(self, height: int, width: int) -> int:
        return max(height, width)

    def _state_floats(self, size: int) -> int:
        rows, columns = self._starts(size)
        return 2 * len(rows) * len(columns) + 4 * self.reference.d

    def _mean_at(self, z: Tensor, t: Tensor, size: int) -> Tensor:
        if len(z) > ITEMS:
            parts = zip(z.split(ITEMS), t.split(ITEMS), strict=True)
            return torch.cat([self._mean_at(*part, size) for part in parts])
        channels, height, width = self.reference.shape
        rows, columns = self._starts(size)
        h, w = min(size, height), min(size, width)
        dtype = Rounding(self.reference, z, t.min()).dtype(h * w * channels)
        windows = _Windows(scaled_latents(images_last(z), t, dtype), rows, h, w)
        # Each window has its own normaliser. A first pass over the images finds them. Then the weights of all windows
        # that hold a pixel can be added before they are multiplied with it, in place of all windows' values.
        softmax = RunningSoftmax((len(columns) * len(rows), len(z)), 0, dtype, z.device)
        groups = [slice(start, start + len(rows)) for start in range(0, len(columns) * len(rows), len(rows))]
        for x in self._chunks(len(z)):
            keys, one = with_half_squares(x, dtype), x.new_ones(1, 1, x.shape[3]).expand(len(rows), -1, -1)
            for left, own in zip(columns, groups, strict=True):
                softmax.add_log_weights(windows.log_weights(keys, left), one, own)
        share = softmax.sums.reciprocal().float()
        total = torch.zeros(height, width * channels, len(z), dtype=torch.float64, device=z.device)
        for x in self._chunks(len(z)):
            keys, values = with_half_squares(x, dtype), x.flatten(1, 2)
            for left, own in zip(columns, groups, strict=True):
                weights = weights_of(windows.log_weights(keys, left), softmax.maximum[own]).mul_(share[own])
                inside = slice(left * channels, (left + w) * channels)
                total[:, inside] += torch.bmm(values[:, inside], windows.over_pixels(weights).mT)
        count = _windows_at(rows, h, height)[:, None] * _windows_at(columns, w, width)
        return total.unflatten(1, (width, channels)).permute(3, 2, 0, 1) / count.to(z.device)

    def _chunks(self, items: int) -> Iterator[Tensor]:
        """Stream images (H, W, C, n), as many as keep the log weights of a column of windows in the cache."""
        channels, height, width = self.reference.shape
        return chunks_with_images_last(self.reference, max(8 * height * items, height * width * (channels + 1)))

    def _starts(self, size: int) -> tuple[Axis, Axis]:
        """First rows and first columns of the windows."""
        _, height, width = self.reference.shape
        return tuple(_starts(length, min(size, length), self.stride) for length in (height, width))  # type: ignore[return-value]


def _starts(length: int, size: int, stride: int) -> Axis:
    """Starts of windows along an axis: every `stride` pixels, and one that ends at the border."""
    return sorted({*range(0, length - size + 1, stride), length - size})


def _windows_at(starts: Axis, size: int, length: int) -> Tensor:
    """Count the windows of an axis that hold each pixel: (length,)."""
    count = torch.zeros(length, dtype=torch.float64)
    for start in starts:
        count[start : start + size] += 1
    return count
