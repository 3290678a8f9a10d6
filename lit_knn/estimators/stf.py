"""Weighted means of random images: SNIS with the uniform proposal, and the stable target field (Xu et al. 2023)."""

import torch
from torch import Generator, Tensor

from lit_knn.estimators.certificate import DrawingEstimator, warped_weighted_mean
from lit_knn.estimators.counts import count
from lit_knn.estimators.draws import Draws


class UniformSNIS(DrawingEstimator):
    """Eq. 11 (eq:SNIS_estimator) with q = 1/N, the μ̂_U of Theorem 4.2 (thm:knn_vs_stf).

    It is biased, O(1/n). It is useless at small t, where n random images rarely include a likely image.

    Args:
        n: draws per z; null for 256.
    """

    shardable = True

    def __init__(self, n: int | None = None) -> None:
        self.n = count(self, "n", n)

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {}

    _warped_mean = warped_weighted_mean

    def draw(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Draws:
        """Draw n images of the set at random, or n − 1 if the source is one of them."""
        others = self.n if x_source is None else self.n - 1
        ids = torch.randint(
            self.reference.N, (len(z), others), device=z.device, generator=generator
        )
        # A source is weighted as if it were one of the draws.
        log_factor = torch.zeros(len(z), self.n, dtype=torch.float64, device=z.device)
        return Draws(ids=ids, log_factor=log_factor, source=x_source)


class STF(UniformSNIS):
    """The stable target field: uniform SNIS over a random batch that also contains the source of z.

    The source is weighted as if it were drawn from the proposal. For a given source, the estimate is therefore biased
    towards it, most at intermediate t; this bias vanishes as n → ∞. On average over the possible sources of z, which
    are draws of p_t(x|z), there is no bias at any n. Proof: this average is E[w_1/Z · Σ w_i x_i / Σ w_i] over uniform
    draws, with the source first and Z the mean weight of all N images. It does not change if any w_j replaces w_1. In
    the sum of these n equal expressions Σ w_i cancels. Batches of different z are independent.

    Args:
        n: images averaged per z, including the source if given; null for 256. Without a source, STF is `UniformSNIS`.
    """

    uses_source = True
    shardable = True
