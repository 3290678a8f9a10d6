"""Multi-sample Monte Carlo with the exact posterior."""

from typing import Self

import torch
from torch import Tensor

from lit_knn.estimators.base import Holdings
from lit_knn.estimators.digit_sums import digit_log_likelihoods, digits_hold
from lit_knn.estimators.draws import DrawingEstimator, Draws, merged
from lit_knn.estimators.enough_digits import exact_products
from lit_knn.linalg.split import Products
from lit_knn.reference import ReferenceSet
from lit_knn.reference.streaming import batches_of, stream_sq_dist
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.warp import Warp


class MonteCarlo(DrawingEstimator):
    """μ̂ = (1/n) Σ x_i with x_i drawn from the exact posterior: Eq. 9 (eq:simple_mc).

    It is unbiased, with variance Var(x|z)/n. On a CPU it costs as much as `ExactFloat64()`, and for pixels on a GPU
    about as much as `Exact()`, whose products it takes. So it is only a yardstick for other sampling estimators.

    Args:
        n: draws per z; null for 256.

    Raises:
        InputError: n < 1.
    """

    def __init__(self, n: int | None = None) -> None:
        self.n = n

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds the norms of the images if it multiplies digits, like `Exact`."""
        return Holdings(arrays=digits_hold(N, device) if pixels and device.type == "cuda" else {})

    def bind(self, reference: ReferenceSet) -> Self:
        """See `Estimator.bind`. On a GPU, it measures which number type is exact enough."""
        super().bind(reference)
        self._products()
        return self

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        ids = self.posterior_ids(z, t, generator)
        return merged(ids, torch.zeros_like(ids, dtype=torch.float64), of_posterior=True)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        ids = self.posterior_ids(z, t.flatten(), generator, warp)
        draws = Draws(ids=ids, log_factor=torch.zeros_like(ids, dtype=torch.float64), of_posterior=True)
        return warp.apply(self._mean(draws, z, t.flatten()).to(x_source.dtype))

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
        cdf = torch.softmax(self._log_likelihoods(z, t, warp), dim=1).cumsum(1)
        u = torch.rand(len(z), self.n, dtype=torch.float64, device=z.device, generator=generator)
        return torch.searchsorted(cdf / cdf[:, -1:], u, right=True)

    def _log_likelihoods(self, z: Tensor, t: Tensor, warp: Warp | None) -> Tensor:
        """Compute log p_t(z|x) without its constant for all images: (B, N) float64."""
        products = self._products() if warp is None else None
        if products is not None:
            return digit_log_likelihoods(self.reference.local, z, t, products)
        log_p = torch.empty(len(z), self.reference.N, dtype=torch.float64, device=z.device)
        for ids, _, sq_dist in stream_sq_dist(self.reference, z, warp):
            log_p[:, ids] = unnormalised_log_likelihood(sq_dist, t)
        return log_p

    def _products(self) -> Products | None:
        """Return the products of `Exact` on a GPU. None stands for float64; a CPU multiplies that fast enough."""
        local = self.reference.local
        if local.device.type != "cuda":
            return None
        return local.cached("products of the posterior", lambda: exact_products(local))
