"""The cases of the referee: data sets, noise levels and the seeds of the latents. All of it is frozen."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.data.reading import read_digits, reference_from
from lit_knn.reference import ReferenceSet

CIFAR10 = (50_000, 3, 32, 32)
CIFAR10_LEVELS = (1, 2, 3, 5, 7, 10, 20, 80)
CIFAR10_RECIPE = "a zip or folder of the 50,000 training images, or prepared ones (lit-knn prepare)"
MILLION_RECIPE = "python -m benchmarks.generate_images CIFAR10.zip million.npy --images 1000000"
LEVELS64 = (2, 5, 10, 20, 40, 80)
CELEBA_RECIPE = "lit-knn prepare CELEBA_FOLDER celeba64.npy --size 64 --center-crop"
IMAGENET_RECIPE = "lit-knn prepare IMAGENET_FOLDER imagenet64.npy --size 64 --center-crop --rgb"


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
        """Make or read the images; refuse `data` that are missing, not asked for, or of another shape."""
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
        """Draw x without replacement and ε, (number, *shape), float64, by NumPy, which is the same on all CPUs."""
        ids = np.random.default_rng([self.seed, 0]).permutation(reference.N)[:number]
        x = reference.gather(torch.from_numpy(ids)).double()
        noise = [np.random.default_rng([self.seed, 1 + i]).standard_normal(reference.shape) for i in range(number)]
        return x, torch.from_numpy(np.stack(noise))


def noisy(x: Tensor, noise: Tensor, t: float) -> Tensor:
    """Return z = x + t ε, rounded once to float32."""
    return (x + t * noise).float()


def digits() -> np.ndarray:
    """Return scikit-learn's 1,797 digits, (N, 1, 8, 8), uint8."""
    return read_digits()[0]


def toy2d() -> np.ndarray:
    """Return 2,000 points (N, 2), uniform on the black squares of a 4x4 checkerboard on [-1, 1]²."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 4, 2000)
    corners = np.stack([2 * rng.integers(0, 2, 2000) + rows % 2, rows], axis=1)
    # Multiples of 2^-12, which float32 holds exactly, so that no processor's last bits show.
    return (np.round(((corners + rng.random((2000, 2))) / 2 - 1) * 2**12) / 2**12).astype(np.float32)


# A line has name, data in words, shape, noise levels, latents and repeats; then how to make or get the images.
_ALL = (
    Case("digits", "scikit-learn's handwritten digits", (1797, 1, 8, 8), (0.2, 0.5, 1, 2, 5, 10), 256, 8, digits),
    Case("toy2d", "points on a checkerboard", (2000, 2), (0.01, 0.03, 0.1, 0.3, 1, 3), 512, 8, toy2d),
    Case("cifar10", "CIFAR-10", CIFAR10, CIFAR10_LEVELS, 256, 4, CIFAR10_RECIPE),
    Case("cifar10_flip", "CIFAR-10 with mirror images", CIFAR10, CIFAR10_LEVELS, 128, 4, CIFAR10_RECIPE, hflip=True),
    Case("million", "blends of CIFAR-10 images", (1_000_000, 3, 32, 32), (2, 5, 10, 20, 80), 64, 2, MILLION_RECIPE),
    Case("celeba64", "CelebA, 64x64", (202_599, 3, 64, 64), LEVELS64, 64, 2, CELEBA_RECIPE),
    Case("imagenet64", "ImageNet, 64x64", (1_281_167, 3, 64, 64), LEVELS64, 64, 2, IMAGENET_RECIPE),
)
CASES = {case.name: case for case in _ALL}
