"""Multi-sample Monte Carlo with the exact posterior."""

import torch
from torch import Generator, Tensor

from lit_knn.estimators.certificate import DrawingEstimator
from lit_knn.estimators.counts import count
from lit_knn.estimators.draws import Draws, merged
from lit_knn.reference.streaming import all_sq_dist, batches_of
from lit_knn.theory.posterior import unnormalised_log_likelihood


class MonteCarlo(DrawingEstimator):
    """μ̂ = (1/n) Σ x_i with x_i drawn from the exact posterior: Eq. 9 (eq:simple_mc).

    It is unbiased, with variance Var(x|z)/n. It costs more than `Exact`, because its products are in float64. It is a
    reference for other sampling estimators, and cannot warp.

    Args:
        n: draws per z; null for 256.
    """

    def __init__(self, n: int | None = None) -> None:
        self.n = count(self, "n", n)

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {}

    def draw(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Draws:
        ids = self.posterior_ids(z, t, generator)
        return merged(ids, torch.zeros_like(ids, dtype=torch.float64), of_posterior=True)

    def posterior_ids(self, z: Tensor, t: Tensor, generator: Generator | None) -> Tensor:
        """Draw n ids for each z from p_t(x|z), Eq. 2 (eq:posterior): (B, n).

        Args:
            z: (B, *shape).
            t: (B,).
            generator: source of randomness.
        """
        ids = torch.empty(len(z), self.n, dtype=torch.long, device=z.device)
        for rows in batches_of(z, self.reference.N):
            sq_dist = all_sq_dist(self.reference, z[rows])
            cdf = torch.softmax(unnormalised_log_likelihood(sq_dist, t[rows]), dim=1).cumsum(1)
            u = torch.rand(
                len(cdf), self.n, dtype=torch.float64, device=z.device, generator=generator
            )
            # Dividing makes the last entry exactly 1, so u < 1 always finds an image.
            ids[rows] = torch.searchsorted(cdf / cdf[:, -1:], u, right=True)
        return ids
