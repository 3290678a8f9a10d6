"""The exact posterior mean in float64, streamed over all images of a set."""

import math

import torch
from torch import Tensor

from lit_knn.reference import ReferenceSet
from lit_knn.reference.streaming import batches_of, stream_sq_dist
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.warp import Warp


def float_sums(
    reference: ReferenceSet, z: Tensor, t: Tensor, warp: Warp | None = None
) -> tuple[Tensor, Tensor]:
    """Compute E[x|z,t], Eq. 8 (eq:posterior_mean), in memory that does not grow with B or N.

    Args:
        reference: the images, of a whole set or of one shard.
        z: (B, *shape), noisy latents.
        t: (B,), noise levels.
        warp: B maps A. The likelihoods then use A x, but the mean is still over x.

    Returns:
        The mean (B, *shape), and the logarithm of the normaliser Σ exp(−‖z − x‖²/2t²), (B,); both float64.
    """
    means = []
    log_normalisers = []
    for rows in batches_of(z, reference.d):
        maps = None if warp is None else warp.rows(rows)
        mean, log_normaliser = _stream(reference, z[rows], t[rows], maps)
        means.append(mean)
        log_normalisers.append(log_normaliser)

    if not means:
        return z.double(), t
    return torch.cat(means).reshape(z.shape), torch.cat(log_normalisers)


def _stream(
    reference: ReferenceSet, z: Tensor, t: Tensor, warp: Warp | None
) -> tuple[Tensor, Tensor]:
    """Compute `float_sums` for one batch. The mean is (B, d)."""
    maximum = torch.full((len(z), 1), -math.inf, dtype=torch.float64, device=z.device)
    normaliser = torch.zeros_like(maximum)
    weighted_sum = torch.zeros(len(z), reference.d, dtype=torch.float64, device=z.device)

    for _, x, sq_dist in stream_sq_dist(reference, z, warp):
        log_p = unnormalised_log_likelihood(sq_dist, t)
        # Weights are relative to the largest so far, so the sums must follow each new maximum.
        new_maximum = torch.maximum(maximum, log_p.amax(1, keepdim=True))
        rescale = (maximum - new_maximum).exp()
        weights = (log_p - new_maximum).exp()

        normaliser = normaliser * rescale + weights.sum(1, keepdim=True)
        weighted_sum = weighted_sum.mul_(rescale).add_(weights @ x.double())
        maximum = new_maximum

    return weighted_sum / normaliser, (maximum + normaliser.log()).squeeze(1)


def join_shards(means: Tensor, log_normalisers: Tensor) -> Tensor:
    """Average the shards' means (shards, B, *shape), weighted by their normalisers (shards, B): (B, *shape)."""
    if len(means) == 1:
        return means[0]
    shares = torch.softmax(log_normalisers, dim=0)
    return (shares.unsqueeze(-1) * means.flatten(2)).sum(0).reshape(means.shape[1:])
