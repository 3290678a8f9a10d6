"""The checked arguments of one call of an estimator."""

from typing import NamedTuple

from torch import Generator, Tensor

from lit_knn.common.memory import to_device
from lit_knn.theory.warp import Warp


class Query(NamedTuple):
    """The checked arguments of one call."""

    z: Tensor  # (B, *shape), noisy latents
    t: Tensor  # (B, 1, …, 1), float64, their noise levels, in the shape of `z`
    x_source: Tensor | None = None  # (B, *shape), the clean x of each z
    generator: Generator | None = None  # source of all randomness; None stands for PyTorch's own
    labels: Tensor | None = None  # (B,), int64, the class of each z, on the CPU or with `z`
    warp: Warp | None = None  # B maps of images, for the mean of warped images

    def rows(self, rows: Tensor) -> "Query":
        """Select the items `rows`, (b,) int64, on the CPU or with `z`."""
        x_source, labels, warp = self.x_source, self.labels, self.warp
        if labels is not None:
            labels = labels[rows.to(labels.device)]

        rows = to_device(rows, self.z.device)
        if x_source is not None:
            x_source = x_source[rows]
        if warp is not None:
            warp = warp.rows(rows)
        return Query(self.z[rows], self.t[rows], x_source, self.generator, labels, warp)
