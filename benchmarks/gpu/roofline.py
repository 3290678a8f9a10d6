"""The roofline of a device: the least time that the bytes and products of an estimator can take."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.timing import measured

SECONDS_PER_RATE = 1.0
# Bfloat16 digits of a float32 number: `Exact` splits z and the weights.
DIGITS = 3
# About the size of a class of ImageNet.
IMAGES_OF_A_CLASS = 1000


class Sizes(NamedTuple):
    """Sizes of one measurement.

    Attributes:
        B: latents per call.
        N: images.
        d: values of an image.
        k: neighbours searched per latent.
        n: images gathered per latent.
        r: principal components.
    """

    B: int
    N: int
    d: int
    k: int
    n: int
    r: int


class Phase(NamedTuple):
    """A part of a call whose bytes and products may overlap in time.

    Attributes:
        bytes: bytes read and written.
        products: multiplications with additions, each counted as two operations.
        dtype: number type of the products.
    """

    bytes: float
    products: float = 0
    dtype: torch.dtype = torch.bfloat16


class Roofline:
    """Measures the rates of a device with plain PyTorch calls: a large copy, and a large product of each type."""

    def __init__(self, device: torch.device, size: int = 8192, copied_bytes: int = 2**30) -> None:
        source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        self.bytes_per_ms = (
            2 * copied_bytes / measured(lambda: target.copy_(source), device, SECONDS_PER_RATE).ms
        )
        self.products_per_ms = {}
        for dtype, side in (
            (torch.bfloat16, size),
            (torch.float32, size // 2),
            (torch.float64, size // 8),
        ):
            a, b = torch.randn(2, side, side, device=device).to(dtype)
            self.products_per_ms[dtype] = (
                2 * side**3 / measured(partial(torch.mm, a, b), device, SECONDS_PER_RATE).ms
            )

    def least_ms(self, phases: Sequence[Phase]) -> float:
        """Return the least milliseconds that the phases take one after the other."""
        return sum(
            max(phase.bytes / self.bytes_per_ms, phase.products / self.products_per_ms[phase.dtype])
            for phase in phases
        )

    def told(self) -> str:
        """Return the rates in one line."""
        rates = (
            f"{str(dtype)[6:]} {rate / 1e9:.3g} TFLOP/s"
            for dtype, rate in self.products_per_ms.items()
        )
        return f"copies {self.bytes_per_ms / 1e6:.4g} GB/s, products in " + ", ".join(rates)


def one_sample(s: Sizes) -> list[Phase]:
    """Copy the sources."""
    return [Phase(8 * s.B * s.d)]


def gathered(s: Sizes) -> list[Phase]:
    """Read the drawn images once in uint8, and z; write the means."""
    return [Phase(s.B * s.n * s.d + 8 * s.B * s.d)]


def knn(s: Sizes) -> list[Phase]:
    """Read all images in 8 bits, multiply them with z, write and read the scores; then gather."""
    return [Phase(s.N * s.d + 8 * s.B * s.N, 2 * s.B * s.N * s.d), *gathered(s)]


def knn_in_components(s: Sizes) -> list[Phase]:
    """Search like `knn`, but in r principal components of 2 bytes."""
    return [Phase(2 * s.N * s.r + 8 * s.B * s.N, 2 * s.B * s.N * s.r), *gathered(s)]


def knn_by_class(s: Sizes) -> list[Phase]:
    """Search like `knn`, but each z only in the images of its class."""
    images = min(IMAGES_OF_A_CLASS, s.N)
    return [
        Phase(min(s.B * images, s.N) * s.d + 8 * s.B * images, 2 * s.B * images * s.d),
        *gathered(s),
    ]


def subspace_knn(s: Sizes) -> list[Phase]:
    """Multiply the coordinates of all images with z, and with the weights of the rest; then gather."""
    product = Phase(2 * s.N * s.r + 8 * s.B * s.N, 2 * s.B * s.N * s.r)
    return [product, product, Phase(2 * s.B * s.n * s.r), *gathered(s)]


def exact(s: Sizes) -> list[Phase]:
    """Read all images in 8 bits twice, and multiply them with the digits of z and of the weights."""
    product = Phase(s.N * s.d + 8 * s.B * s.N, 2 * DIGITS * s.B * s.N * s.d)
    return [product, product]


def monte_carlo(s: Sizes) -> list[Phase]:
    """Multiply z with all images in float64, then gather."""
    return [Phase(s.N * s.d + 16 * s.B * s.N, 2 * s.B * s.N * s.d, torch.float64), *gathered(s)]
