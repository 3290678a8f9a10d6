"""An estimator with noise of a chosen covariance added."""

from typing import Literal, Self, get_args

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import InputError, check_not_negative
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.composite import Wrapper
from lit_knn.estimators.exact import Exact
from lit_knn.estimators.monte_carlo import MonteCarlo
from lit_knn.estimators.query import Query
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import per_item

Covariance = Literal["posterior", "isotropic", "shuffled", "none"]


class Noised(Wrapper):
    """Another estimate plus scale times a noise whose mean is 0: for experiments on the noise of targets.

    The noise is x − E[x|z], where x is one draw from the posterior p_t(x|z) (Eq. 2, eq:posterior). `covariance` says
    what becomes of it:

    - `posterior`: the noise itself. With `Exact` and scale 1 the estimate is one sample in law.
    - `isotropic`: a noise of equal length in a uniformly random direction. So its covariance is a multiple of the
      identity, and at each z the distribution of its length, and with it the trace, is that of `posterior`.
    - `shuffled`: the noise x' − E[x|z'] of another latent z' = x' + tε of a random image x'. The covariance is that of
      `posterior`, averaged over p_t(z): right on average, but without relation to z.
    - `none`: no noise.

    The estimate has the bias of `estimator`. Its variance is scale² times that of the noise, plus the estimator's. A
    call costs as much as the estimator and `MonteCarlo(1)`, `shuffled` as much as the estimator and `Exact`. It needs
    one more `Exact` for noise around the mean at z, if the estimator is another.

    Args:
        estimator: the estimator to add noise to; it is copied.
        covariance: which noise.
        scale: factor of the noise, at least 0.
    """

    def __init__(self, estimator: Estimator, covariance: Covariance, scale: float) -> None:
        super().__init__(estimator)
        if covariance not in get_args(Covariance):
            names = ", ".join(get_args(Covariance))
            raise InputError(f"Noised: covariance={covariance!r} must be one of {names}")
        check_not_negative(**{"Noised: scale": scale})
        self.covariance, self.scale = covariance, scale
        self.exact, self.draws = Exact(), MonteCarlo(n=1)

    @property
    def has_noise(self) -> bool:
        """Whether the estimate differs from the part's."""
        return self.covariance != "none" and self.scale > 0

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        return self.estimator.deterministic and not self.has_noise

    def bind(self, reference: ReferenceSet) -> Self:
        """Bind a copy of the estimator, and what draws the noise."""
        super().bind(reference)
        self.exact, self.draws = Exact().bind(reference), MonteCarlo(n=1).bind(reference)
        return self

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        """Add the noise to the part's estimate: (B, *shape)."""
        # Half precision would round the noise of a small t away.
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        estimate = self.part.mean_of(Query(z, t, x_source, generator))
        if not self.has_noise:
            return estimate

        if self.covariance == "shuffled":
            return estimate + self.scale * self._noise_of_another_latent(z, t, generator)

        is_exact = type(self.estimator) is Exact
        mean = estimate if is_exact else self.exact.mean_of(Query(z, t))
        ids = self.draws.posterior_ids(z, t.flatten(), generator)
        noise = self.reference.take(ids[:, 0]) - mean
        if self.covariance == "isotropic":
            noise = in_random_directions(noise, generator)
        return estimate + self.scale * noise

    def _noise_of_another_latent(self, z: Tensor, t: Tensor, generator: Generator | None) -> Tensor:
        """Return x' − E[x|z'] for each z, (B, *shape), where z' is made from a random image x' at the same t."""
        ids = torch.randint(self.reference.N, (len(z),), device=z.device, generator=generator)
        # The image that a latent is made from is one draw from the latent's posterior.
        x = self.reference.take(ids)
        epsilon = torch.randn(z.shape, dtype=z.dtype, device=z.device, generator=generator)
        another = (x + t * epsilon).to(z.dtype)
        return x - self.exact.mean_of(Query(another, t))


def in_random_directions(noise: Tensor, generator: Generator | None) -> Tensor:
    """Return vectors (B, *shape) of the lengths of `noise`, in independent directions uniform on the sphere."""
    directions = torch.randn(
        noise.shape, dtype=noise.dtype, device=noise.device, generator=generator
    )
    lengths = noise.flatten(1).norm(dim=1) / directions.flatten(1).norm(dim=1)
    return directions * per_item(lengths, directions)
