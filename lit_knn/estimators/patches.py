"""Base class of the estimators of patches: sizes by noise level, and images in an order that makes patches cheap."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator, Holdings
from lit_knn.estimators.counts import check_count
from lit_knn.reference import Reference
from lit_knn.reference.streaming import work_bytes
from lit_knn.rng import keyed_generator
from lit_knn.theory.filter_extent import extents, power_spectrum

# Running sums of one batch, at most, in bytes. Another batch reads all images again.
STATE_BYTES = 512 * 2**20
# The spectrum of images is smooth: 2,000 images give its extents.
SPECTRUM_IMAGES = 2000
# Noise levels of the computed table, relative to the data's standard deviation.
LEVELS_PER_DECADE, DECADES = 6, 3


class PatchEstimator(Estimator):
    """An estimator of the mean by patches of the images, whose size depends on the noise level."""

    odd = False
    """Tells whether a size must be odd."""

    def __init__(self, size: int | dict[float, int] | None) -> None:
        self.size = size
        self._given = self._checked(size)
        self._table: dict[float, int] = {}

    @property
    def sizes_in_use(self) -> dict[float, int]:
        """The size of each noise level, known after `bind`. Between two levels, the nearest in log t counts."""
        return dict(self._table)

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Computes the sizes if none are given."""
        if len(reference.shape) != 3:
            raise InputError(f"{type(self).__name__}: needs images (C, H, W), got data of shape {reference.shape}")
        largest = self._largest(*reference.shape[1:])
        for size in (self._given or {}).values():
            if size > largest:
                raise InputError(f"{type(self).__name__}: size={size} is more than {largest}, which sees a whole image")
        super().bind(reference)
        self._table = self._given or _table(reference, largest)
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds nothing except the images."""
        return Holdings()

    @abstractmethod
    def _largest(self, height: int, width: int) -> int:
        """Return the size from which on a patch is the whole image."""

    @abstractmethod
    def _state_floats(self, size: int) -> int:
        """Return the number of float64 values that one item needs."""

    @abstractmethod
    def _mean_at(self, z: Tensor, t: Tensor, size: int) -> Tensor:
        """Estimate the mean with patches of one size. Returns float64, like z in shape."""

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        sizes = self._sizes_at(t)
        mean = torch.empty_like(z, dtype=torch.float64)
        for size in sorted(set(sizes)):
            rows = [row for row, own in enumerate(sizes) if own == size]
            step = max(STATE_BYTES // (8 * self._state_floats(size)), 1)
            for start in range(0, len(rows), step):
                part = torch.tensor(rows[start : start + step], device=z.device)
                mean[part] = self._mean_at(z[part], t[part], size)
        return mean

    def _sizes_at(self, t: Tensor) -> list[int]:
        """Return the size for each noise level. One size for all levels needs no value from the GPU."""
        if len(self._table) == 1:
            return [*self._table.values()] * len(t)
        return [self._table[min(self._table, key=lambda own: abs(math.log(own / level)))] for level in t.tolist()]

    def _checked(self, size: Any) -> dict[float, int] | None:
        """Return the sizes as a table, or None."""
        if size is None:
            return None
        name = type(self).__name__
        table = size if isinstance(size, Mapping) else {1.0: size}
        if not table:
            raise InputError(f"{name}: size must be a number, a table of at least one noise level, or null, got {size}")
        for level, own in table.items():
            if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level < math.inf:
                raise InputError(f"{name}: the noise levels of size must be finite and above 0, got {level!r}")
            if check_count(name, "size", own) % 2 == 0 and self.odd:
                raise InputError(f"{name}: size must be odd, because a patch has a centre pixel, got {own}")
        return {float(level): own for level, own in table.items()}


def images_last(x: Tensor) -> Tensor:
    """Copy images (n, C, H, W) to (H, W, C, n). Then a patch is a few long runs of memory."""
    return x.permute(2, 3, 1, 0).contiguous()


def chunks_with_images_last(reference: Reference, floats_per_image: int) -> Iterator[Tensor]:
    """Stream all images as (H, W, C, n) float32, where n images with `floats_per_image` float64 fit `work_bytes`."""
    rows = max(work_bytes(reference.device) // (8 * floats_per_image), 1)
    for _, x in reference.chunks(rows):
        yield images_last(x)


def _table(reference: Reference, largest: int) -> dict[float, int]:
    """Compute the sizes from a seeded subset of the images."""
    ids = torch.randperm(reference.N, generator=keyed_generator("cpu", 0))[:SPECTRUM_IMAGES]
    x = reference.take(ids.to(reference.device)).double() - reference.mean().double().reshape(reference.shape)
    spectrum = power_spectrum(x)
    deviation = spectrum.mean((1, 2)).mean().sqrt().item()
    if deviation == 0:
        # Images without variation: every patch has the same mean, and the whole image is the cheapest one.
        return {1.0: largest}
    steps = range(-DECADES * LEVELS_PER_DECADE, DECADES * LEVELS_PER_DECADE + 1)
    levels = [deviation * 10 ** (step / LEVELS_PER_DECADE) for step in steps]
    # At levels far below the spectrum, an ever wider filter gains ever less. Less noise never asks for a larger patch.
    # A window wider than the image gains little, and the whole image is cheaper.
    widest = max(reference.shape[1:])
    wanted = [extent if extent <= widest else largest for extent in extents(spectrum, levels)]
    sizes = list(accumulate(reversed(wanted), min, initial=largest))[:0:-1]
    return dict(zip(levels, sizes, strict=True))
