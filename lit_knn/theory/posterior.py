"""The posterior over a finite data set: Eqs. 1, 2, 5 and 8, in log space.

Distances are squared L2 in model space. Likelihoods belong to the EDM process, p_t(z|x) = N(z; x, t²I), except in
functions that take a `process`.
"""

import math

import torch
from torch import Tensor

from lit_knn.theory.noise import EDM_PROCESS, Process, per_item

# Number of terms per block. float32 sums the terms of a block, and float64 sums the blocks.
TERMS_PER_SUM = 64


def direct_sq_dist(z: Tensor, x: Tensor) -> Tensor:
    """‖z − x‖², (B, n) float64, from the difference z − x, so no digits are lost when z is close to x.

    Args:
        z: (B, *shape).
        x: (B, n, *shape), n candidates of each z.
    """
    difference = (x - z.unsqueeze(1)).flatten(2)
    # Every weight depends on this sum. A pure float32 sum would lose a digit or two, so float64 adds the blocks.
    whole = difference.shape[2] // TERMS_PER_SUM * TERMS_PER_SUM
    blocks = torch.linalg.vector_norm(difference[..., :whole].unflatten(2, (-1, TERMS_PER_SUM)), dim=3)
    rest = torch.linalg.vector_norm(difference[..., whole:], dim=2)
    return blocks.double().square().sum(2) + rest.double().square()


def cross_sq_dist(z: Tensor, x: Tensor) -> Tensor:
    """‖z − x‖² between every z and every x, (B, N) float64, as ‖z‖² + ‖x‖² − 2 z·x.

    At small t (t_min = 0.002) this form would lose all digits in float32; in float64 it keeps about nine. Rounding may
    make tiny values negative.

    Args:
        z: (B, d).
        x: (N, d).
    """
    z, x = z.double(), x.double()
    norms = z.square().sum(1, keepdim=True) + x.square().sum(1)
    return torch.addmm(norms, z, x.T, alpha=-2.0)


def unnormalised_log_likelihood(sq_dist: Tensor, t: Tensor | float) -> Tensor:
    """log p_t(z|x) without the Gaussian's constant: −‖z − x‖² / 2t², (B, n) float64 (line 2 of Algorithm 1).

    The constant is the same for all x, so posteriors, proposals and importance weights do not need this constant.

    Args:
        sq_dist: (B, n), squared L2, model space.
        t: (B,) or scalar, t > 0.
    """
    return sq_dist.double() / (-2.0 * per_item(t, sq_dist).double().square())


def log_likelihood(sq_dist: Tensor, t: Tensor | float, d: int) -> Tensor:
    """log p_t(z|x) = log N(z; x, t²I), (B, n) float64, the forward likelihood (below Eq. 2, eq:posterior).

    Args:
        sq_dist: (B, n), squared L2, model space.
        t: (B,) or scalar, t > 0.
        d: flattened dimension.
    """
    log_t = per_item(t, sq_dist).double().log()
    return unnormalised_log_likelihood(sq_dist, t) - d * (0.5 * math.log(2 * math.pi) + log_t)


def log_marginal(sq_dist: Tensor, t: Tensor | float, d: int) -> Tensor:
    """log p_t(z), (B,) float64, Eq. 1 (eq:marginal), from the distances to all N images; see `log_likelihood`."""
    return torch.logsumexp(log_likelihood(sq_dist, t, d), dim=1) - math.log(sq_dist.shape[1])


def log_posterior(sq_dist: Tensor, t: Tensor | float) -> Tensor:
    """log p_t(x_i|z), (B, N) float64, Eq. 2 (eq:posterior), from the distances to all N images as in `log_marginal`."""
    return torch.log_softmax(unnormalised_log_likelihood(sq_dist, t), dim=1)


def posterior_mean(z: Tensor, x: Tensor, t: Tensor | float) -> Tensor:
    """E[x|z,t], (B, *shape) float64, Eq. 8 (eq:posterior_mean), by exact enumeration of a set that fits in memory.

    `lit_knn.estimators.Exact` computes the same mean, but streams over a reference set of any size.

    Args:
        z: (B, *shape), noisy latents.
        x: (N, *shape), the data set.
        t: (B,) or scalar, t > 0.
    """
    weights = log_posterior(cross_sq_dist(z.flatten(1), x.flatten(1)), t).exp()
    return (weights @ x.flatten(1).double()).reshape(z.shape)


def score_from_mean(mu: Tensor, z: Tensor, t: Tensor | float, process: Process = EDM_PROCESS) -> Tensor:
    """The score ∇ log p_t(z) = (s·E[x|z/s,σ] − z) / (s·σ)², (B, *shape) (appendix, ap:general_diffusion).

    In the EDM process (s(t) = 1, σ(t) = t) it is (E[x|z,t] − z) / t², Eq. 5 (eq:clean_score).

    Args:
        mu: (B, *shape), exact or estimated posterior mean of the clean x.
        z: (B, *shape), noisy latents.
        t: (B,) or scalar, t > 0.
        process: the noise process.
    """
    t = per_item(t, z)
    return (process.scale(t) * mu - z) / process.noise_std(t).square()


def mean_from_score(score: Tensor, z: Tensor, t: Tensor | float, process: Process = EDM_PROCESS) -> Tensor:
    """Invert `score_from_mean`: E[x|z,t] = (z + (s·σ)²·∇ log p_t(z)) / s, with the same shapes."""
    t = per_item(t, z)
    return (z + process.noise_std(t).square() * score) / process.scale(t)
