"""Wrapper that uses more images for each z until its estimated error is small enough."""

import copy
import math
from typing import Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Holdings
from lit_knn.estimators.counts import check_count, settled
from lit_knn.estimators.enough_digits import LARGEST_SQ_ERROR
from lit_knn.estimators.exact import Exact, ExactFloat64
from lit_knn.estimators.sampled import Certificate, CertifiedEstimator
from lit_knn.reference import Reference
from lit_knn.theory.warp import Warp

# Cost of gathering one image, relative to the cost of one image in the exact mean. It lies between 10 and 40, because
# the product of the exact mean serves a whole batch.
GATHERED_SHARE = 16


class Adaptive(CertifiedEstimator):
    """Repeats another estimator with more images for every z whose estimated error is above a tolerance.

    Each repetition is a fresh estimate from `growth` times more images. A z that is still above the tolerance with the
    most images allowed gets the exact posterior mean, Eq. 8 (eq:posterior_mean). So the error per dimension is near
    the tolerance if the certificates are right. An estimate within the tolerance equals the plain estimator's, bit for
    bit.

    A certificate is an estimate, not a bound. It cannot see images that were not drawn: if one draw has all the weight,
    the estimated error is 0, although a likelier image may be missing. Estimates that missed something are therefore
    kept more often. This adds a bias, which `growth` cannot remove. So wrap an estimator whose proposal covers the
    posterior (SubspaceKNN, KNN), not a uniform one.

    On a GPU a call waits for the device once for its check of the input, and once for each attempt that is made.

    The result depends only on the generator's state and the batch. Later draws for a z depend on which other z of its
    batch are repeated.

    Args:
        estimator: the estimator to wrap, which must give certificates; it starts with its own n. It is copied.
        tolerance: squared error per dimension that is good enough.
        growth: factor of n from one attempt to the next.
        max_n: most images gathered per z; null for N/16, above which a product with all images is cheaper. If
            n·growth is larger than this, nothing is repeated.

    Attributes:
        attempts: after `bind`, the copies of the estimator with n, n·growth, … images.

    Raises:
        InputError: `estimator` gives no certificates, has n < 2 (one image has no spread), or is itself Adaptive;
            tolerance is not above 0 and finite; growth < 2; max_n < n; at `bind`, max_n > N, or the estimator refuses
            the set.
    """

    def __init__(
        self, estimator: CertifiedEstimator, tolerance: float, growth: int = 4, max_n: int | None = None
    ) -> None:
        name = type(estimator).__name__
        if not isinstance(estimator, CertifiedEstimator):
            raise InputError(f"Adaptive: estimator={name} does not tell its own error; use one that draws images")
        if hasattr(estimator, "attempts"):
            raise InputError("Adaptive: estimator=Adaptive adapts already")
        if estimator.n < 2:
            raise InputError(f"Adaptive: {name} with n={estimator.n} cannot tell its own error; use n >= 2")
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
            raise InputError(f"Adaptive: tolerance must be finite and above 0, got {tolerance!r}")
        if check_count("Adaptive", "growth", growth) == 1:
            raise InputError("Adaptive: growth must be at least 2, got 1")
        if max_n is not None and check_count("Adaptive", "max_n", max_n) < estimator.n:
            raise InputError(f"Adaptive: max_n={max_n} is less than n={estimator.n} of {name}")
        self.estimator, self.tolerance, self.growth, self.max_n = estimator, tolerance, growth, max_n
        self.n = estimator.n
        self.uses_source = estimator.uses_source
        self.attempts: list[CertifiedEstimator] = []
        self._exact: ExactFloat64 | None = None
        self._last_counts: tuple[int, ...] = ()

    @property
    def last_counts(self) -> tuple[int, ...]:
        """How many z of the last call were settled by n images, by n·growth images, …, and by the exact mean."""
        return self._last_counts

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Binds one copy of the wrapped estimator for each n."""
        super().bind(reference)
        if self.max_n is not None and self.max_n > reference.N:
            raise InputError(f"Adaptive: max_n={self.max_n} is more than the {reference.N} images of the reference set")
        limit = reference.N // GATHERED_SHARE if self.max_n is None else self.max_n
        first = copy.copy(self.estimator)
        self.attempts = [first.bind(reference)]
        self.n = first.n
        while (n := self.attempts[-1].n * self.growth) <= limit:
            attempt = settled(first)
            attempt.n = n
            if attempt.n != n:
                raise InputError(f"Adaptive: {type(first).__name__} was given n={n} and keeps n={attempt.n}")
            self.attempts.append(attempt.bind(reference))
        self._exact = None
        return self

    @property
    def can_warp(self) -> bool:
        """Tells whether the wrapped estimator can warp."""
        return self.estimator.can_warp

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings | None:
        """See `Estimator.holds`. Counts the arrays of the wrapped estimator and of the exact mean."""
        wrapped, exact = self.estimator.holds(N, d, pixels, device), Exact().holds(N, d, pixels, device)
        return None if wrapped is None else Holdings(wrapped.neighbours, {**wrapped.arrays, **exact.arrays})

    def _exact_mean(self, z: Tensor, t: Tensor) -> Tensor:
        """Compute the exact posterior mean. The first call binds the exact estimator."""
        if self._exact is None:
            # `Exact` may use integer sums. Their error must be below the tolerance, too.
            kind = Exact if self.tolerance >= LARGEST_SQ_ERROR else ExactFloat64
            self._exact = kind().bind(self.reference)
        return self._exact._checked_mean(z, t, None, None, None)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self._certify(z, t, x_source, generator).mean

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Use the wrapped estimator once, because means of warped images have no certificate."""
        self._last_counts = (len(z), *[0] * len(self.attempts))
        return self.attempts[0].warped_mean(z, t, warp, x_source, generator)

    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Certificate:
        """See `certified_mean`. Rows with the exact mean have error 0 and the weight statistics of the last attempt."""
        first, *others = self.attempts
        # Clone the parts, because rows are replaced below. Replacing a row of an expanded tensor would change all rows.
        result = Certificate(*(part.clone() for part in first._checked_certificate(z, t, x_source, generator)))
        rows, counts = self._above(result), [len(z)]
        for attempt in others:
            counts.append(len(rows))
            if len(rows):
                source = None if x_source is None else x_source[rows]
                again = attempt._checked_certificate(z[rows], t[rows], source, generator)
                for part, new in zip(result, again, strict=True):
                    part[rows] = new
                rows = rows[self._above(again)]
        counts.append(len(rows))
        if len(rows):
            result.mean[rows] = self._exact_mean(z[rows], t[rows])
            result.sq_error[rows] = 0.0
        self._last_counts = tuple(more - left for more, left in zip(counts, [*counts[1:], 0], strict=True))
        return result

    def _above(self, certificate: Certificate) -> Tensor:
        """Return the indices of rows whose error is above the tolerance or NaN."""
        return (~(certificate.sq_error <= self.tolerance)).nonzero()[:, 0]
