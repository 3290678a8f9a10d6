"""SNIS with the uniform proposal."""

import torch
from torch import Tensor

from lit_knn.estimators.base import Holdings
from lit_knn.estimators.draws import Draws, uniform_draws, uniform_ids
from lit_knn.estimators.sampled import SampledEstimator


class UniformSNIS(SampledEstimator):
    """Eq. 11 (eq:SNIS_estimator) with q = 1/N, the μ̂_U of Theorem 4.2 (thm:knn_vs_stf).

    It is biased, O(1/n). It is useless at small t, where n random images rarely include likely ones.

    Args:
        n: draws per z; null for 256.

    Raises:
        InputError: n < 1.
    """

    shardable = True

    def __init__(self, n: int | None = None) -> None:
        self.n = n

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds nothing except the images."""
        return Holdings()

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        return uniform_draws(uniform_ids(self.reference, len(z), self.n, generator))
