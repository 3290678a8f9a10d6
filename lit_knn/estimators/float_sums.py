"""The exact posterior mean by sums in float64, streamed over the images."""

import math

import torch
from torch import Tensor

from lit_knn.reference import ReferenceSet
from lit_knn.reference.streaming import batches_of, stream_sq_dist
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.warp import Warp


def float_sums(reference: ReferenceSet, z: Tensor, t: Tensor, warp: Warp | None = None) -> tuple[Tensor, Tensor]:
    """Compute E[x|z,t], Eq. 8 (eq:posterior_mean), for z (B, *shape) at t (B,). The memory does not grow with B or N.

    With `warp`, B maps A, the likelihoods use A x, but the mean is still over x.

    Returns:
        The mean (B, *shape), and the logarithm of the normaliser Σ exp(−‖z − x‖²/2t²), (B,); float64.
    """
    parts = [
        _stream(reference, z[rows], t[rows], None if warp is None else warp.rows(rows))
        for rows in batches_of(z, reference.d)
    ]
    if not parts:
        return z.double(), t
    mu, log_normaliser = (torch.cat(part) for part in zip(*parts, strict=True))
    return mu.reshape(z.shape), log_normaliser


def _stream(reference: ReferenceSet, z: Tensor, t: Tensor, warp: Warp | None) -> tuple[Tensor, Tensor]:
    """Compute `float_sums` for one batch. The mean is (B, d)."""
    maximum = torch.full((len(z), 1), -math.inf, dtype=torch.float64, device=z.device)
    normaliser = torch.zeros_like(maximum)
    weighted_sum = torch.zeros(len(z), reference.d, dtype=torch.float64, device=z.device)
    for _, x, sq_dist in stream_sq_dist(reference, z, warp):
        log_p = unnormalised_log_likelihood(sq_dist, t)
        new_maximum = torch.maximum(maximum, log_p.amax(1, keepdim=True))
        rescale = (maximum - new_maximum).exp()
        weights = (log_p - new_maximum).exp()
        normaliser = normaliser * rescale + weights.sum(1, keepdim=True)
        weighted_sum = weighted_sum.mul_(rescale).add_(weights @ x.double())
        maximum = new_maximum
    return weighted_sum / normaliser, (maximum + normaliser.log()).squeeze(1)
