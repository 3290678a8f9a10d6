"""The exact posterior mean over all images of the reference set: three classes that differ in number type."""

from typing import Self

import torch
from torch import Tensor

from lit_knn.distributed import in_every_process, rank_and_size
from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator, Holdings
from lit_knn.estimators.counts import check_count
from lit_knn.estimators.digit_sums import digit_sums, digits_hold
from lit_knn.estimators.enough_digits import enough_digits, exact_products
from lit_knn.estimators.float_sums import float_sums
from lit_knn.linalg.split import Int8Products, Products, multiplies_int8
from lit_knn.reference import ReferenceSet
from lit_knn.theory.warp import Warp

MAX_DIGITS = 4
# Default number of digits if fewer digits are not exact enough.
MOST_CHOSEN = 3


class ExactFloat64(Estimator):
    """E[x|z,t] over all N images, Eq. 8 (eq:posterior_mean), in float64: no bias and no variance, cost O(N·d) per z.

    All other estimators are compared with this one. It streams the images with a running maximum, normaliser and
    weighted sum, so memory stays bounded for any B and N.
    """

    deterministic = True
    shardable = True

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds nothing except the images."""
        return Holdings()

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        means, log_normalisers = self.reference.over_shards(self._mean, z, t.flatten())
        return _join(means, log_normalisers)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Compute in float64, and resample every image for each z. This costs N times as much as warping a batch."""

        def mean(reference: ReferenceSet, z: Tensor, t: Tensor, flips: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
            return float_sums(reference, z, t, Warp(flips.bool(), theta))

        # Some backends of torch.distributed cannot send bool.
        means, log_normalisers = self.reference.over_shards(mean, z, t.flatten(), warp.flips.byte(), warp.theta)
        return warp.apply(_join(means, log_normalisers).to(x_source.dtype))

    def _mean(self, reference: ReferenceSet, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exact mean over a set or shard, (B, *shape), and its log normaliser, (B,), both in float64."""
        return float_sums(reference, z, t)


class Exact(ExactFloat64):
    """E[x|z,t] over all N images, Eq. 8 (eq:posterior_mean), in the fastest type that is exact enough.

    For pixels it splits z and the images' weights into digits of 8 bits, and multiplies these with the pixels: as 8-bit
    integers (`ExactInt8`) on a CPU that multiplies them and on NVIDIA's cards for desktops since the 30 series, in
    bfloat16 with float32 sums on its other cards since compute capability 8.0 (A100, H100, H200, B200). It does so if
    `bind` measures, on the device of the images, a squared error per dimension below 1e-9. Otherwise, and for images
    that are not uint8, it computes like `ExactFloat64`.
    """

    shardable = True

    _products: Products | None = None
    _measured_on: torch.device | None = None

    @property
    def digits_in_use(self) -> int | None:
        """Number of digits of z, known after `bind`. None stands for float64."""
        return None if self._products is None else self._products.digits

    @property
    def type_in_use(self) -> str:
        """Number type of the products, known after `bind`: int8, bfloat16 or float64."""
        return "float64" if self._products is None else self._products.name

    def bind(self, reference: ReferenceSet) -> Self:
        """See `Estimator.bind`. Measures which number type is exact enough."""
        super().bind(reference)
        self._measure()
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds the norms of the images if it multiplies digits."""
        return Holdings(arrays=digits_hold(N, device) if pixels else {})

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        if self._measured_on != self.reference.device:
            # The images have moved since `bind`, on all ranks.
            self._measure()
        return super()._posterior_mean(z, t, x_source, generator)

    def _measure(self) -> None:
        """Choose the products for the device of the images."""
        reference = self.reference
        # Each shard computes its own mean, and all shards must have the same precision.

        def local_products() -> Products | None:
            return self._products_for(reference.local)

        found = in_every_process(local_products) if reference.sharded else [local_products()]
        own = found[rank_and_size()[0] if reference.sharded else 0]
        digits = [products.digits for products in found if products is not None]
        agreed = len(digits) == len(found)
        self._products = type(own)(max(digits)) if own is not None and agreed else None
        self._measured_on = reference.device

    def _products_for(self, reference: ReferenceSet) -> Products | None:
        return exact_products(reference)

    def _mean(self, reference: ReferenceSet, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if self._products is None:
            return super()._mean(reference, z, t)
        return digit_sums(reference, z, t, self._products)


class ExactInt8(Exact):
    """E[x|z,t] over all N images, Eq. 8 (eq:posterior_mean), by products of 8-bit integers, for pixels.

    Pixels are integers already; z and the weights are split into 8-bit digits. On a CPU this is several times faster
    than `ExactFloat64`. On CIFAR-10 two digits keep the squared error below 1e-9.

    Args:
        digits: digits of z, at most 4, because a float32 has no more. null for 2 if that is exact enough, or else 3.

    Raises:
        InputError: digits outside [1, 4]; at `bind`, images that are not uint8, or a device that does not multiply
            8-bit integers: a CPU without such instructions, or a GPU below compute capability 8.0.
    """

    shardable = True

    def __init__(self, digits: int | None = None) -> None:
        self.digits = None if digits is None else check_count("ExactInt8", "digits", digits)
        if digits is not None and digits > MAX_DIGITS:
            raise InputError(f"ExactInt8: digits must be at most {MAX_DIGITS}, got {digits}: a float32 has no more")

    def bind(self, reference: ReferenceSet) -> Self:
        """See `Estimator.bind`. Measures how many digits are enough."""
        self._check_suits(reference.local)
        return super().bind(reference)

    def _products_for(self, reference: ReferenceSet) -> Products:
        self._check_suits(reference)
        if self.digits is not None:
            return Int8Products(self.digits)
        return enough_digits(reference, Int8Products) or Int8Products(MOST_CHOSEN)

    @staticmethod
    def _check_suits(reference: ReferenceSet) -> None:
        if reference.images.dtype != torch.uint8 or not multiplies_int8(reference.device):
            raise InputError(
                f"ExactInt8: needs uint8 images and a device that multiplies int8, got {reference.images.dtype} on "
                f"{reference.device}; use ExactFloat64"
            )


def _join(means: Tensor, log_normalisers: Tensor) -> Tensor:
    """Average the shards' means (shards, B, *shape), weighted by their normalisers (shards, B): (B, *shape)."""
    if len(means) == 1:
        return means[0]
    shares = torch.softmax(log_normalisers, dim=0)
    return (shares.unsqueeze(-1) * means.flatten(2)).sum(0).reshape(means.shape[1:])
