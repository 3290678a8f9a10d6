"""Multi-sample Monte Carlo with the exact posterior."""

import torch
from torch import Tensor

from lit_knn.estimators.base import Holdings
from lit_knn.estimators.draws import Draws, merged_draws
from lit_knn.estimators.sampled import SampledEstimator, gather
from lit_knn.reference.streaming import batches_of, stream_sq_dist
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.warp import Warp


class MonteCarlo(SampledEstimator):
    """μ̂ = (1/n) Σ x_i with x_i drawn from the exact posterior: Eq. 9 (eq:simple_mc).

    It is unbiased, with variance Var(x|z)/n. It costs as much as `ExactFloat64()`, so it is only a yardstick for other
    sampling estimators.

    Args:
        n: draws per z; null for 256.

    Raises:
        InputError: n < 1.
    """

    def __init__(self, n: int | None = None) -> None:
        self.n = n

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds nothing except the images."""
        return Holdings()

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        ids = self.posterior_ids(z, t, generator)
        return merged_draws(ids, torch.zeros_like(ids, dtype=torch.float64), of_posterior=True)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        mean = torch.empty_like(x_source)
        for rows, x in gather(self.reference, self.posterior_ids(z, t, generator, warp)):
            mean[rows] = x.mean(1)
        return warp.apply(mean)

    def posterior_ids(
        self, z: Tensor, t: Tensor, generator: torch.Generator | None, warp: Warp | None = None
    ) -> Tensor:
        """Draw n ids for each z (B, *shape) at t (B,) from p_t(x|z), Eq. 2 (eq:posterior): (B, n).

        With `warp`, the posterior is over images warped by each z's map.
        """
        ids = torch.empty(len(z), self.n, dtype=torch.long, device=z.device)
        for rows in batches_of(z, self.reference.N):
            part = None if warp is None else warp.rows(rows)
            ids[rows] = self._invert_cdf(z[rows], t[rows], generator, part)
        return ids

    def _invert_cdf(self, z: Tensor, t: Tensor, generator: torch.Generator | None, warp: Warp | None) -> Tensor:
        log_p = torch.empty(len(z), self.reference.N, dtype=torch.float64, device=z.device)
        for ids, _, sq_dist in stream_sq_dist(self.reference, z, warp):
            log_p[:, ids] = unnormalised_log_likelihood(sq_dist, t)
        cdf = torch.softmax(log_p, dim=1).cumsum(1)
        u = torch.rand(len(z), self.n, dtype=torch.float64, device=z.device, generator=generator)
        return torch.searchsorted(cdf / cdf[:, -1:], u, right=True)
