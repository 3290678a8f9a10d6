"""The posterior over patches at the same position, recombined by averaging."""

from typing import Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.counts import check_count
from lit_knn.estimators.patches import PatchEstimator, chunks_with_images_last, images_last
from lit_knn.estimators.running_mean import RunningMean, keys_of, products_dtype, values_of
from lit_knn.reference import Reference
from lit_knn.reference.streaming import work_bytes

Axis = list[int]


class PatchPosterior(PatchEstimator):
    """PSPC: the posterior mean of each patch of z over the images' patches at the same position.

    Each p×p window of z has its own posterior over the N images, softmax(−‖z_w − x_w‖²/2t²). Windows overlap, and each
    pixel is the average of the posterior means of the windows that hold it (Niedoba et al. 2024, arXiv 2411.19339). A
    window of the whole image gives `Exact`. The cost is that of two products of all z with all patches, 2·N·C·p² per
    window in place of 2·N·d per z. It is deterministic.

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
        channels, height, width = self.reference.shape
        return 2 * len(rows) * len(columns) * (channels * min(size, height) * min(size, width) + 2)

    def _mean_at(self, z: Tensor, t: Tensor, size: int) -> Tensor:
        channels, height, width = self.reference.shape
        rows, columns = self._starts(size)
        h, w = min(size, height), min(size, width)
        K, across = h * w * channels, len(columns)

        def windows(images: Tensor, top: int) -> Tensor:
            """All windows with this first row, (W', h, w, C, n)."""
            every = images[top : top + h].unfold(1, w, 1)
            return (every if every.shape[1] == across else every[:, columns]).permute(1, 0, 4, 2, 3)

        own = images_last(z.double())
        queries = torch.cat([windows(own, top).flatten(1, 3).mT for top in rows])
        dtype = products_dtype(self.reference, z, t.min(), K)
        state = RunningMean(queries, t, K, dtype)
        # Many images for few windows at a time, because each piece also reads and writes the sums of its windows.
        floats = 2 * (K + len(z))
        for x in chunks_with_images_last(self.reference, max(floats, self.reference.d // 2)):
            step = max(work_bytes(x.device) // (8 * floats * x.shape[3]), 1)
            for number, top in enumerate(rows):
                for first, patches in enumerate(windows(x, top).split(step)):
                    start = number * across + first * step
                    groups = slice(start, start + len(patches))
                    state.add(keys_of(patches, K, dtype), values_of(patches, K), groups)
        return _averaged(state.mean().unflatten(2, (h, w, channels)), rows, columns, z)

    def _starts(self, size: int) -> tuple[Axis, Axis]:
        """First rows and first columns of the windows."""
        _, height, width = self.reference.shape
        return tuple(_starts(length, min(size, length), self.stride) for length in (height, width))  # type: ignore[return-value]


def _starts(length: int, size: int, stride: int) -> Axis:
    """Starts of windows along an axis: every `stride` pixels, and one that ends at the border."""
    return sorted({*range(0, length - size + 1, stride), length - size})


def _averaged(means: Tensor, rows: Axis, columns: Axis, z: Tensor) -> Tensor:
    """Average the windows' means (rows·columns, B, h, w, C) in each pixel: like z."""
    h, w = means.shape[2:4]
    total = torch.zeros_like(z, dtype=torch.float64)
    count = total.new_zeros(z.shape[2:])
    for number, mean in enumerate(means.movedim(4, 2)):
        top, left = rows[number // len(columns)], columns[number % len(columns)]
        total[:, :, top : top + h, left : left + w] += mean
        count[top : top + h, left : left + w] += 1
    return total / count
