"""Stable target field (Xu et al. 2023)."""

import torch
from torch import Tensor

from lit_knn.estimators.base import Holdings
from lit_knn.estimators.draws import Draws, uniform_draws, uniform_ids
from lit_knn.estimators.sampled import SampledEstimator


class STF(SampledEstimator):
    """The stable target field: uniform SNIS over a random batch that also contains the source of z.

    The source is weighted as if it were drawn from the proposal. For a given source, the estimate is therefore biased
    towards it, most at intermediate t; this bias vanishes as n → ∞. On average over the possible sources of z, which
    are draws of p_t(x|z), there is no bias at any n. Proof: E[w_1/Z · Σ w_i x_i / Σ w_i] over uniform draws does not
    change if any w_j replaces w_1, and in the sum over j the Σ w_i cancels. Batches of different z are independent.

    Args:
        n: images averaged per z, including the source if given; null for 256. Without a source, STF is `UniformSNIS`.

    Raises:
        InputError: n < 1.
    """

    uses_source = True
    shardable = True

    def __init__(self, n: int | None = None) -> None:
        self.n = n

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds nothing except the images."""
        return Holdings()

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        drawn = self.n if x_source is None else self.n - 1
        return uniform_draws(uniform_ids(self.reference, len(z), drawn, generator), x_source)
