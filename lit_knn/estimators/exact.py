"""The exact posterior mean, streamed over the reference set."""

import math

import torch
from torch import Tensor

from lit_knn.estimators.base import Estimator
from lit_knn.estimators.streaming import batches_of, stream_sq_dist
from lit_knn.posterior import unnormalised_log_likelihood


class Exact(Estimator):
    """E[x|z,t] over all N images, Eq. 8 (eq:posterior_mean): no bias and no variance, cost O(N·d) per z.

    Streams the images in chunks with a running maximum, normaliser and weighted sum, so that memory stays
    bounded whatever B and N. All of it in float64: float32 sums over a chunk of many images drift.
    """

    deterministic = True

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        mu = torch.empty_like(z)
        for rows in batches_of(z, self.reference.d):
            mu[rows] = self._stream(z[rows], t[rows]).to(z.dtype)
        return mu

    def _stream(self, z: Tensor, t: Tensor) -> Tensor:
        """The exact mean of one batch, (B, *shape), float64."""
        maximum = torch.full((len(z), 1), -math.inf, dtype=torch.float64, device=z.device)
        normaliser = torch.zeros_like(maximum)
        weighted_sum = torch.zeros(len(z), self.reference.d, dtype=torch.float64, device=z.device)
        for _, x, sq_dist in stream_sq_dist(self.reference, z):
            log_p = unnormalised_log_likelihood(sq_dist, t)
            new_maximum = torch.maximum(maximum, log_p.amax(1, keepdim=True))
            rescale = (maximum - new_maximum).exp()
            weights = (log_p - new_maximum).exp()
            normaliser = normaliser * rescale + weights.sum(1, keepdim=True)
            weighted_sum = weighted_sum.mul_(rescale).add_(weights @ x.double())
            maximum = new_maximum
        return (weighted_sum / normaliser).reshape(z.shape)
