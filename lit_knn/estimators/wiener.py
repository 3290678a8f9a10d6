"""The linear estimator of the posterior mean."""

from collections.abc import Mapping
from typing import ClassVar, Self

from torch import Generator, Tensor

from lit_knn.estimators.base import Estimator
from lit_knn.estimators.counts import Limit, count, fitted_count, of_components
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import components_of


class Wiener(Estimator):
    """The Wiener filter: the posterior mean of a Gaussian with the data's mean and covariance.

    μ̂ = m + P·Λ(Λ + t²)⁻¹·P'(z − m) + c/(c + t²)·(I − PP')(z − m), with the data's mean m, the r leading principal
    components P, their variances Λ, and one variance c for all other directions. It is the cheapest estimator, best at
    very large t and useless at small t. It is deterministic. At r = d it is the best linear estimate, and no option
    can lower its error further.

    The error vanishes as t grows, because the posterior mean becomes linear in z. At r = d the squared error falls as
    t⁻⁴, with leading term Σ κ_ijk² / 2t⁴ for third cumulants κ of the data, or as t⁻⁶ if these vanish (symmetric
    data). At r < d it falls as t⁻² at the largest t, unless all variances outside P equal c. For sets above 128 MiB in
    float32 the covariance comes from a subset, which increases the error at r = d by some per cent.

    Args:
        r: principal components, at most min(N, d); null for 512, or min(N, d) if that is less.
    """

    deterministic = True
    shardable = True
    limits: ClassVar[Mapping[str, Limit]] = {"r": of_components}

    def __init__(self, r: int | None = None) -> None:
        self.r = count(self, "r", r)

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        # The set keeps the components for `_posterior_mean`.
        components_of(reference, self.r)
        return self

    def memory(self, N: int, d: int) -> dict[str, int]:
        r = fitted_count(self, "r", N, d)
        return {f"r={r} components": 4 * r * d}

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        """Shrink each component of z − m by its variance, and all other directions by their common one."""
        p = components_of(self.reference, self.r)
        # Keep float64: in float32 a small t² would be 0, and the ratio 0/0 if the images do not vary.
        noise = t.reshape(-1, 1).square()
        centred = z.flatten(1).float() - p.mean
        y = centred @ p.basis
        # Apply c/(c + t²) in all directions, then add the difference along P.
        outside = (p.residual_variance / (p.residual_variance + noise)).float()
        along = (p.variances / (p.variances + noise)).float()
        return (p.mean + outside * centred + p.expand((along - outside) * y)).reshape(z.shape)
