"""The posterior over a finite data set: Eqs. 1, 2, 5 and 8, in log space.

Every function is pure. Distances are squared L2 in model space; likelihoods are those of the EDM process,
p_t(z|x) = N(z; x, t²I).
"""

import math

import torch
from torch import Tensor

from lit_knn.process import per_item


def direct_sq_dist(z: Tensor, x: Tensor) -> Tensor:
    """‖z − x‖² from the difference itself, so that no digits are lost when z is close to x.

    Args:
        z: (B, *shape).
        x: (B, n, *shape), n candidates of each z.

    Returns:
        (B, n), float64.
    """
    difference = (x - z.unsqueeze(1)).flatten(2)
    return torch.linalg.vector_norm(difference, dim=2).double().square()


def cross_sq_dist(z: Tensor, x: Tensor) -> Tensor:
    """‖z − x‖² of every z with every x, as ‖z‖² + ‖x‖² − 2 z·x in float64.

    In float32 this form loses all digits at small t (t_min = 0.002); in float64 it keeps about nine.

    Args:
        z: (B, d).
        x: (N, d).

    Returns:
        (B, N), float64, never negative beyond rounding.
    """
    z, x = z.double(), x.double()
    norms = z.square().sum(1, keepdim=True) + x.square().sum(1)
    return torch.addmm(norms, z, x.T, alpha=-2.0)


def unnormalised_log_likelihood(sq_dist: Tensor, t: Tensor | float) -> Tensor:
    """log p_t(z|x) up to the constant of the Gaussian, −‖z − x‖² / 2t² (line 2 of Algorithm 1).

    The constant is the same for all x, so posteriors, proposals and importance weights do not need it.

    Args:
        sq_dist: (B, n), squared L2, model space.
        t: (B,) or scalar, t > 0.

    Returns:
        (B, n), float64.
    """
    return sq_dist.double() / (-2.0 * per_item(t, sq_dist).double().square())


def log_likelihood(sq_dist: Tensor, t: Tensor | float, d: int) -> Tensor:
    """log p_t(z|x) = log N(z; x, t²I), the forward likelihood (below Eq. 2, eq:posterior).

    Args:
        sq_dist: (B, n), squared L2, model space.
        t: (B,) or scalar, t > 0.
        d: flattened dimension.

    Returns:
        (B, n), float64.
    """
    log_t = per_item(t, sq_dist).double().log()
    return unnormalised_log_likelihood(sq_dist, t) - d * (0.5 * math.log(2 * math.pi) + log_t)


def log_marginal(sq_dist: Tensor, t: Tensor | float, d: int) -> Tensor:
    """log p_t(z), Eq. 1 (eq:marginal), from the distances to all N images.

    Args:
        sq_dist: (B, N), squared L2, model space.
        t: (B,) or scalar, t > 0.
        d: flattened dimension.

    Returns:
        (B,), float64.
    """
    return torch.logsumexp(log_likelihood(sq_dist, t, d), dim=1) - math.log(sq_dist.shape[1])


def log_posterior(sq_dist: Tensor, t: Tensor | float) -> Tensor:
    """log p_t(x_i|z), Eq. 2 (eq:posterior), from the distances to all N images.

    Args:
        sq_dist: (B, N), squared L2, model space.
        t: (B,) or scalar, t > 0.

    Returns:
        (B, N), float64; the exponentials of a row sum to 1.
    """
    return torch.log_softmax(unnormalised_log_likelihood(sq_dist, t), dim=1)


def posterior_mean(z: Tensor, x: Tensor, t: Tensor | float) -> Tensor:
    """E[x|z,t], Eq. 8 (eq:posterior_mean), by enumeration: exact, for sets that fit in memory at once.

    `lit_knn.estimators.Exact("float64")` computes the same by streaming over a reference set of any size.

    Args:
        z: (B, *shape), noisy latents.
        x: (N, *shape), the data set.
        t: (B,) or scalar, t > 0.

    Returns:
        (B, *shape), float64.
    """
    weights = log_posterior(cross_sq_dist(z.flatten(1), x.flatten(1)), t).exp()
    return (weights @ x.flatten(1).double()).reshape(z.shape)


def score_from_mean(mu: Tensor, z: Tensor, t: Tensor | float) -> Tensor:
    """∇ log p_t(z) = (E[x|z,t] − z) / t², Eq. 5 (eq:clean_score).

    Args:
        mu: (B, *shape), posterior mean or an estimate of it.
        z: (B, *shape), noisy latents.
        t: (B,) or scalar, t > 0.

    Returns:
        (B, *shape).
    """
    return (mu - z) / per_item(t, z).square()


def mean_from_score(score: Tensor, z: Tensor, t: Tensor | float) -> Tensor:
    """E[x|z,t] = z + t²·∇ log p_t(z), Eq. 5 (eq:clean_score) solved for the mean; shapes as `score_from_mean`."""
    return z + per_item(t, z).square() * score
