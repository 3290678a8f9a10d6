"""The exact posterior mean, streamed over the reference set."""

import math
from typing import Self

import torch
from torch import Tensor

from lit_knn.compute import is_native
from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.counts import check_count
from lit_knn.estimators.integer_sums import integer_sums
from lit_knn.estimators.streaming import batches_of, stream_sq_dist
from lit_knn.posterior import unnormalised_log_likelihood
from lit_knn.reference import ReferenceSet
from lit_knn.warp import Warp

# Of 8 bits.
MAX_DIGITS = 4


class Exact(Estimator):
    """E[x|z,t] over all N images, Eq. 8 (eq:posterior_mean): no bias and no variance, cost O(N·d) per z.

    In float64 it streams the images in chunks with a running maximum, normaliser and weighted sum, so that memory stays
    bounded whatever B and N. In `int8` both products are those of pixels, which are integers, with z and the weights
    split into digits of 8 bits: several times faster. Its squared error per dimension, on CIFAR-10 at t from 0.5 to 80,
    is at most 1.7e-10 with three digits and 1.2e-9 with two, which are faster still.

    Args:
        compute: `float64`; `int8`, for pixels on a CPU; or `auto`, int8 where it goes.
        digits: of `int8`, at most 4: a float32 has no more.

    Raises:
        InputError: another type, digits outside [1, 4]; at `bind`, `int8` where the images are not uint8 or the device
            does not multiply it.
    """

    deterministic = True
    can_warp = True

    def __init__(self, compute: str = "float64", digits: int = 3) -> None:
        if compute not in ("float64", "int8", "auto"):
            raise InputError(f"Exact: compute={compute!r} must be float64, int8 or auto")
        self.compute = compute
        self.digits = check_count("Exact", "digits", digits)
        if digits > MAX_DIGITS:
            raise InputError(f"Exact: digits must be at most {MAX_DIGITS}, got {digits}: a float32 has no more")

    def bind(self, reference: ReferenceSet) -> Self:
        """See `Estimator.bind`."""
        if self.compute == "int8" and not _suits_integers(reference):
            raise InputError(
                f"Exact: compute=int8 needs uint8 images and a CPU that multiplies int8, got {reference.images.dtype} "
                f"on {reference.device}; use float64"
            )
        return super().bind(reference)

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
            return self._streamed(reference, z, t, Warp(flips.bool(), theta))

        # Backends of torch.distributed differ in whether they send bool.
        means, log_normalisers = self.reference.over_shards(mean, z, t, warp.flips.byte(), warp.theta)
        return warp.apply(_join(means, log_normalisers).to(x_source.dtype))

    def _mean(self, reference: ReferenceSet, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The exact mean over a set, or a shard, (B, *shape), and the logarithm of its normaliser, (B,); float64."""
        if self.compute == "int8" or (self.compute == "auto" and _suits_integers(reference)):
            return integer_sums(reference, z, t, self.digits)
        return self._streamed(reference, z, t)

    def _streamed(
        self, reference: ReferenceSet, z: Tensor, t: Tensor, warp: Warp | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `_mean`, in float64; with `warp` by the likelihoods of the warped images."""
        parts = [
            self._stream(reference, z[rows], t[rows], None if warp is None else warp.rows(rows))
            for rows in batches_of(z, reference.d)
        ]
        if not parts:
            return z.double(), t
        mu, log_normaliser = (torch.cat(part) for part in zip(*parts, strict=True))
        return mu.reshape(z.shape), log_normaliser

    def _stream(self, reference: ReferenceSet, z: Tensor, t: Tensor, warp: Warp | None) -> tuple[Tensor, Tensor]:
        """`_streamed` of one batch; the mean is (B, d)."""
        maximum = torch.full((len(z), 1), -math.inf, dtype=torch.float64, device=z.device)
        normaliser = torch.zeros_like(maximum)
        weighted_sum = torch.zeros(len(z), reference.d, dtype=torch.float64, device=z.device)
        for _, x, sq_dist in stream_sq_dist(reference, z, warp):
            log_p = unnormalised_log_likelihood(sq_dist, t)
            new_maximum = torch.maximum(maximum, log_p.amax(1, keepdim=True))
            rescale = (maximum - new_maximum).exp()
            weights = (log_p - new_maximum).exp()
            normaliser = normaliser * rescale + weights.sum(1, keepdim=True)
            weighted_sum = weighted_sum.mul_(rescale).add_(weights @ x.double())
            maximum = new_maximum
        return weighted_sum / normaliser, (maximum + normaliser.log()).squeeze(1)


def _join(means: Tensor, log_normalisers: Tensor) -> Tensor:
    """The mean over all shards, (B, *shape), from each one's, (shards, B, *shape), and their normalisers."""
    shares = torch.softmax(log_normalisers, dim=0)
    return (shares.unsqueeze(-1) * means.flatten(2)).sum(0).reshape(means.shape[1:])


def _suits_integers(reference: ReferenceSet) -> bool:
    return reference.images.dtype == torch.uint8 and is_native(torch.int8, reference.device)
