"""As many images for each z as its own error asks for."""

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

# A gathered image costs about as much as the exact mean's product with 10 to 40 images, which a batch shares.
GATHERED_SHARE = 16


class Adaptive(CertifiedEstimator):
    """Another estimator, repeated with more images for just those z whose certificate is above a tolerance.

    Each repetition is a fresh estimate from `growth` times as many images. What is still above the tolerance with the
    most images allowed gets the exact posterior mean, Eq. 8 (eq:posterior_mean). So the error per dimension is near
    the tolerance where the certificate tells the truth, and an estimate that is good enough is that of the plain
    estimator, bit for bit.

    A certificate is an estimate, not a bound, and what is not among the draws it cannot see: where one draw has all
    the weight it is 0, which is no proof that no likelier image was missed. Keeping the estimates that seem certain
    prefers those that missed something, a bias of its own beside that of the estimator, which `growth` cannot remove.
    Wrap an estimator whose proposal covers the posterior (SubspaceKNN, KNN), not the uniform ones.

    One generator gives one result; the later draws for a z depend on which others of its batch are repeated.

    Args:
        estimator: what is wrapped, with its n images for a start; anything with a certificate. It is copied.
        tolerance: squared error per dimension that is good enough.
        growth: factor of n from one attempt to the next.
        max_n: images gathered for each z at most; null for N/16, beyond which a product with all images is cheaper.
            Nothing is repeated where n·growth is more.

    Raises:
        InputError: `estimator` has no certificate, n < 2 (one image has no spread), or adapts itself; tolerance not
            above 0 and finite, growth < 2, max_n < n; at `bind`, max_n > N, or what the estimator refuses.
    """

    def __init__(
        self, estimator: CertifiedEstimator, tolerance: float, growth: int = 4, max_n: int | None = None
    ) -> None:
        name = type(estimator).__name__
        if not hasattr(estimator, "certified_mean"):
            raise InputError(f"Adaptive: estimator={name} does not tell its own error; use one that draws images")
        if hasattr(estimator, "last_counts"):
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
        self._attempts: list[CertifiedEstimator] = []
        self._exact: ExactFloat64 | None = None
        self._last_counts: tuple[int, ...] = ()

    @property
    def last_counts(self) -> tuple[int, ...]:
        """How many z of the last call were settled with n, n·growth, … images, and, last, exactly."""
        return self._last_counts

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`; binds a copy of the wrapped estimator for each n."""
        super().bind(reference)
        if self.max_n is not None and self.max_n > reference.N:
            raise InputError(f"Adaptive: max_n={self.max_n} is more than the {reference.N} images of the reference set")
        limit = reference.N // GATHERED_SHARE if self.max_n is None else self.max_n
        first = copy.copy(self.estimator)
        self._attempts = [first.bind(reference)]
        self.n = first.n
        while (n := self._attempts[-1].n * self.growth) <= limit:
            attempt = settled(first)
            attempt.n = n
            self._attempts.append(attempt.bind(reference))
        self._exact = None
        return self

    @property
    def can_warp(self) -> bool:
        """Whether the wrapped estimator can."""
        return self.estimator.can_warp

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings | None:
        """See `Estimator.holds`: what the wrapped estimator holds, and the exact mean."""
        wrapped, exact = self.estimator.holds(N, d, pixels, device), Exact().holds(N, d, pixels, device)
        return None if wrapped is None else Holdings(wrapped.neighbours, {**wrapped.arrays, **exact.arrays})

    def _exact_mean(self, z: Tensor, t: Tensor) -> Tensor:
        """The exact mean, bound when it is first needed."""
        if self._exact is None:
            # What integers are off must be less than the tolerance, too.
            kind = Exact if self.tolerance >= LARGEST_SQ_ERROR else ExactFloat64
            self._exact = kind().bind(self.reference)
        return self._exact.posterior_mean(z, t)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self._certify(z, t, x_source, generator).mean

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """That of the wrapped estimator, not repeated: means of warped images have no certificate."""
        self._last_counts = (len(z), *[0] * len(self._attempts))
        return self._attempts[0].warped_mean(z, t, warp, x_source, generator)

    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Certificate:
        """As `certified_mean`; for exact rows the error is 0, and the weights are those of the last attempt."""
        first, *others = self._attempts
        result = first.certified_mean(z, t, x_source, generator)
        rows, counts = self._above(result), [len(z)]
        for attempt in others:
            counts.append(len(rows))
            if len(rows):
                source = None if x_source is None else x_source[rows]
                again = attempt.certified_mean(z[rows], t[rows], source, generator)
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
        """Indices of the rows above the tolerance, also those whose error is not a number."""
        return (~(certificate.sq_error <= self.tolerance)).nonzero()[:, 0]
