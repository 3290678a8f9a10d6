"""The cases of the referee: frozen data, latents and exact means."""

import numpy as np

from lit_knn.common.errors import InputError
from lit_knn.data.reading import read_digits
from lit_knn.referee.cases.case import Case
from lit_knn.referee.cases.loading import LoadedCase, load_case

__all__ = ["CASES", "Case", "LoadedCase", "case_named", "load_case"]

CIFAR10 = (50_000, 3, 32, 32)
CIFAR10_LEVELS = (1, 2, 3, 5, 7, 10, 20, 80)
CIFAR10_RECIPE = "a zip or folder of the 50,000 training images, or prepared ones (lit-knn prepare)"
MILLION_RECIPE = "python -m benchmarks.generate_images CIFAR10.zip million.npy --images 1000000"
LEVELS64 = (2, 5, 10, 20, 40, 80)
CELEBA_RECIPE = "lit-knn prepare CELEBA_FOLDER celeba64.npy --size 64 --center-crop"
IMAGENET_RECIPE = "lit-knn prepare IMAGENET_FOLDER imagenet64.npy --size 64 --center-crop"


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
    Case("celeba64", "CelebA, 64x64", (162_770, 3, 64, 64), LEVELS64, 64, 2, CELEBA_RECIPE),
    Case("imagenet64", "ImageNet, 64x64", (1_281_167, 3, 64, 64), LEVELS64, 64, 2, IMAGENET_RECIPE),
)
CASES = {case.name: case for case in _ALL}


def case_named(name: str) -> Case:
    """Return a case; raise InputError if there is none of this name."""
    if name not in CASES:
        raise InputError(f"--case {name}: no such case; there are {', '.join(CASES)}")
    return CASES[name]
