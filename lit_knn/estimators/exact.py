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
        shares = torch.softmax(log_normalisers, dim=0)
        return (shares.unsqueeze(-1) * means.flatten(2)).sum(0).reshape(z.shape)

    def _mean(self, reference: ReferenceSet, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The exact mean over a set, or a shard, (B, *shape), and the logarithm of its normaliser, (B,); float64."""
        if self.compute == "int8" or (self.compute == "auto" and _suits_integers(reference)):
            return integer_sums(reference, z, t, self.digits)
        parts = [self._stream(reference, z[rows], t[rows]) for rows in batches_of(z, reference.d)]
        if not parts:
            return z.double(), t
        mu, log_normaliser = (torch.cat(part) for part in zip(*parts, strict=True))
        return mu.reshape(z.shape), log_normaliser

    def _stream(self, reference: ReferenceSet, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """`_mean` of one batch, in float64; the mean is (B, d)."""
        maximum = torch.full((len(z), 1), -math.inf, dtype=torch.float64, device=z.device)
        normaliser = torch.zeros_like(maximum)
        weighted_sum = torch.zeros(len(z), reference.d, dtype=torch.float64, device=z.device)
        for _, x, sq_dist in stream_sq_dist(reference, z):
            log_p = unnormalised_log_likelihood(sq_dist, t)
            new_maximum = torch.maximum(maximum, log_p.amax(1, keepdim=True))
            rescale = (maximum - new_maximum).exp()
            weights = (log_p - new_maximum).exp()
            normaliser = normaliser * rescale + weights.sum(1, keepdim=True)
            weighted_sum = weighted_sum.mul_(rescale).add_(weights @ x.double())
            maximum = new_maximum
        return weighted_sum / normaliser, (maximum + normaliser.log()).squeeze(1)


def _suits_integers(reference: ReferenceSet) -> bool:
    return reference.images.dtype == torch.uint8 and is_native(torch.int8, reference.device)
