"""A case: a data set, noise levels and the seed of the latents. All of it is frozen."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.data.reading import reference_from
from lit_knn.reference import ReferenceSet


@dataclass(frozen=True)
class Case:
    """A case of the referee."""

    name: str
    about: str  # the data, in a few words
    shape: tuple[int, ...]  # (N, *shape) of the stored images
    levels: tuple[float, ...]  # noise levels t
    latents: int  # number of latents z at each level
    repeats: int  # R, calls of a random estimator at each latent
    images: Callable[[], np.ndarray] | str  # makes the images; or the recipe for a copy that the user names by `--data`
    hflip: bool = False  # whether mirrored images count, too
    seed: int = 0  # of the latents

    @property
    def recipe(self) -> str | None:
        """How the user gets a copy of the images; None if the case makes them."""
        return self.images if isinstance(self.images, str) else None

    @property
    def N(self) -> int:
        """Number of images, mirrored ones included."""
        return self.shape[0] * (2 if self.hflip else 1)

    @property
    def k(self) -> int:
        """Neighbours of the reference estimator."""
        return min(2048, self.N // 4)

    @property
    def n(self) -> int:
        """Draws of the reference estimator."""
        return min(256, self.N // 4)

    def reference_set(self, data: Path | None) -> ReferenceSet:
        """Make or read the images.

        Raises:
            InputError: `data` is missing, not asked for, cannot be read, or has another shape.
        """
        if not isinstance(self.images, str):
            if data is not None:
                raise InputError(f"--data {data}: case {self.name} makes its own data")
            return ReferenceSet(self.images(), hflip=self.hflip)
        if data is None:
            raise InputError(f"case {self.name} needs --data PATH: {self.images}")
        reference = reference_from(data, hflip=self.hflip)
        stored = reference.images
        if tuple(stored.shape) != self.shape or stored.dtype != torch.uint8:
            got = f"{tuple(stored.shape)} {stored.dtype}"
            raise InputError(f"--data {data}: case {self.name} has images {self.shape} of uint8, got {got}")
        return reference

    def draw(self, reference: ReferenceSet, number: int) -> tuple[Tensor, Tensor]:
        """Return the images x and the noise ε of the first `number` latents, (number, *shape), float64.

        Images are drawn without replacement. NumPy draws both: the normal numbers of PyTorch depend on the CPU.
        """
        ids = np.random.default_rng([self.seed, 0]).permutation(reference.N)[:number]
        x = reference.gather(torch.from_numpy(ids)).double()
        noise = [np.random.default_rng([self.seed, 1 + i]).standard_normal(reference.shape) for i in range(number)]
        return x, torch.from_numpy(np.stack(noise))


def noisy(x: Tensor, noise: Tensor, t: float) -> Tensor:
    """Return z = x + t ε, rounded once to float32."""
    return (x + t * noise).float()
