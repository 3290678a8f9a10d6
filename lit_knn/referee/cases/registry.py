"""The list of cases."""

from typing import Any

from lit_knn.common.errors import InputError
from lit_knn.data.reading import read_digits
from lit_knn.referee.cases import generated
from lit_knn.referee.cases.case import Case

CIFAR10_RECIPE = "a zip or folder of the 50,000 training images, or prepared ones (lit-knn prepare)"
CIFAR10: dict[str, Any] = {
    "shape": (50_000, 3, 32, 32),
    "levels": (1, 2, 3, 5, 7, 10, 20, 80),
    "latents": 256,
    "repeats": 4,
}
LEVELS64 = (2, 5, 10, 20, 40, 80)

_ALL = (
    Case(
        name="digits",
        about="scikit-learn's handwritten digits",
        shape=(1797, 1, 8, 8),
        levels=(0.2, 0.5, 1, 2, 5, 10),
        latents=256,
        repeats=8,
        make=lambda: read_digits()[0],
    ),
    Case(
        name="toy2d",
        about="points on a checkerboard",
        shape=(2000, 2),
        levels=(0.01, 0.03, 0.1, 0.3, 1, 3),
        latents=512,
        repeats=8,
        make=generated.toy2d,
    ),
    Case(
        name="gmm64",
        about="64 Gaussians in 64 dimensions",
        shape=(10_000, 64),
        levels=(0.1, 0.2, 0.5, 1, 2, 5),
        latents=256,
        repeats=8,
        make=generated.gmm64,
    ),
    Case(
        name="latents",
        about="float latents with a falling spectrum",
        shape=(20_000, 4, 16, 16),
        levels=(3, 5, 7, 10, 20, 40),
        latents=256,
        repeats=4,
        make=generated.latents,
    ),
    Case(name="cifar10", about="CIFAR-10", recipe=CIFAR10_RECIPE, **CIFAR10),
    Case(
        name="cifar10_flip",
        about="CIFAR-10 with mirror images",
        recipe=CIFAR10_RECIPE,
        hflip=True,
        **CIFAR10 | {"latents": 128},
    ),
    Case(
        name="million",
        about="a million images blended from CIFAR-10",
        shape=(1_000_000, 3, 32, 32),
        levels=(2, 5, 10, 20, 80),
        latents=64,
        repeats=2,
        recipe="python -m benchmarks.generate_images CIFAR10.zip million.npy --images 1000000",
    ),
    Case(
        name="celeba64",
        about="CelebA, 64x64",
        shape=(162_770, 3, 64, 64),
        levels=LEVELS64,
        latents=64,
        repeats=2,
        recipe="lit-knn prepare CELEBA_FOLDER celeba64.npy --size 64 --center-crop",
    ),
    Case(
        name="imagenet64",
        about="ImageNet, 64x64",
        shape=(1_281_167, 3, 64, 64),
        levels=LEVELS64,
        latents=64,
        repeats=2,
        recipe="lit-knn prepare IMAGENET_FOLDER imagenet64.npy --size 64 --center-crop",
    ),
)
CASES = {case.name: case for case in _ALL}


def case_named(name: str) -> Case:
    """Return a case; raise InputError if there is none of this name."""
    if name not in CASES:
        raise InputError(f"--case {name}: no such case; there are {', '.join(CASES)}")
    return CASES[name]
