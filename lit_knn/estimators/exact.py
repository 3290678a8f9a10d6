"""The exact posterior mean, over all images of the reference set."""

from typing import Self

import torch
from torch import Tensor

from lit_knn.distributed import in_every_process
from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.counts import check_count
from lit_knn.estimators.enough_digits import enough_digits
from lit_knn.estimators.float_sums import float_sums
from lit_knn.estimators.integer_sums import integer_sums
from lit_knn.linalg.dtypes import is_native
from lit_knn.reference import ReferenceSet
from lit_knn.theory.warp import Warp

# Of 8 bits.
MAX_DIGITS = 4
# Of those that are tried.
MOST_CHOSEN = 3


class Exact(Estimator):
    """E[x|z,t] over all N images, Eq. 8 (eq:posterior_mean): no bias and no variance, cost O(N·d) per z.

    By default it takes the fastest type that keeps the squared error per dimension below 1e-9 for the images at hand,
    which `bind` measures. In `int8`, for pixels on a CPU, both products are those of pixels, which are integers, with z
    and the weights split into digits of 8 bits: several times faster than `float64`, which is the reference, and which
    streams the images with a running maximum, normaliser and weighted sum, so that memory stays bounded whatever B and
    N. On CIFAR-10 two digits are taken.

    Args:
        compute: `auto`, int8 where it goes and is exact enough, and otherwise float64; `float64`; or `int8`.
        digits: of z in int8, at most 4: a float32 has no more. null for 2 or 3, the fewest that are exact enough; with
            `int8` it is 3 where neither is.

    Raises:
        InputError: another type, digits outside [1, 4]; at `bind`, `int8` where the images are not uint8 or the device
            does not multiply it.
    """

    deterministic = True
    can_warp = True

    def __init__(self, compute: str = "auto", digits: int | None = None) -> None:
        if compute not in ("float64", "int8", "auto"):
            raise InputError(f"Exact: compute={compute!r} must be float64, int8 or auto")
        self.compute = compute
        self.digits = None if digits is None else check_count("Exact", "digits", digits)
        if digits is not None and digits > MAX_DIGITS:
            raise InputError(f"Exact: digits must be at most {MAX_DIGITS}, got {digits}: a float32 has no more")
        self._digits_in_use: int | None = None

    @property
    def digits_in_use(self) -> int | None:
        """Digits of z in int8, after `bind`; None for float64."""
        return self._digits_in_use

    def bind(self, reference: ReferenceSet) -> Self:
        """See `Estimator.bind`; finds out which type is exact enough."""
        if self.compute == "int8" and not _suits_integers(reference):
            raise InputError(
                f"Exact: compute=int8 needs uint8 images and a CPU that multiplies int8, got {reference.images.dtype} "
                f"on {reference.device}; use float64"
            )
        super().bind(reference)
        self._digits_in_use = None if self.compute == "float64" else self._choose_digits(reference)
        return self

    def _choose_digits(self, reference: ReferenceSet) -> int | None:
        if not reference.sharded:
            return self._digits_for(reference)
        # Each shard has a mean of its own; all are computed alike.
        each = in_every_process(lambda: self._digits_for(reference.local))
        found = [digits for digits in each if digits is not None]
        return max(found) if len(found) == len(each) else None

    def _digits_for(self, reference: ReferenceSet) -> int | None:
        if not _suits_integers(reference):
            return None
        found = enough_digits(reference) if self.digits is None else self.digits
        return MOST_CHOSEN if found is None and self.compute == "int8" else found

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        means, log_normalisers = self.reference.over_shards(self._mean, z, t)
        return _join(means, log_normalisers)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """In float64, every image resampled for each z: N times the cost of warping a batch."""

        def mean(reference: ReferenceSet, z: Tensor, t: Tensor, flips: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
            return float_sums(reference, z, t, Warp(flips.bool(), theta))

        # Backends of torch.distributed differ in whether they send bool.
        means, log_normalisers = self.reference.over_shards(mean, z, t, warp.flips.byte(), warp.theta)
        return warp.apply(_join(means, log_normalisers).to(x_source.dtype))

    def _mean(self, reference: ReferenceSet, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The exact mean over a set, or a shard, (B, *shape), and the logarithm of its normaliser, (B,); float64."""
        # After `bind` the images may have been moved.
        if self._digits_in_use is None or not _suits_integers(reference):
            return float_sums(reference, z, t)
        return integer_sums(reference, z, t, self._digits_in_use)


def _join(means: Tensor, log_normalisers: Tensor) -> Tensor:
    """The mean over all shards, (B, *shape), from each one's, (shards, B, *shape), and their normalisers."""
    shares = torch.softmax(log_normalisers, dim=0)
    return (shares.unsqueeze(-1) * means.flatten(2)).sum(0).reshape(means.shape[1:])


def _suits_integers(reference: ReferenceSet) -> bool:
    return reference.images.dtype == torch.uint8 and is_native(torch.int8, reference.device)
