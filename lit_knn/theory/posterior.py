"""The posterior over a finite data set: Eqs. 2, 5 and 8, in log space.

Distances are squared L2 in model space. Likelihoods belong to the EDM process, p_t(z|x) = N(z; x, t²I), except in
functions that take a `process`.
"""

import torch
from torch import Tensor

from lit_knn.theory.noise import EDM_PROCESS, Process, per_item

# Number of terms per block. float32 sums the terms of a block, and float64 sums the blocks.
TERMS_PER_SUM = 64


def direct_sq_dist(z: Tensor, x: Tensor) -> Tensor:
    """Return ‖z − x‖², (B, n) float64, from the difference z − x, which keeps all digits if z is close to x.

    Args:
        z: (B, *shape).
        x: (B, n, *shape), n images for each z.
    """
    difference = (x - z.unsqueeze(1)).flatten(2)
    # Every weight depends on this sum. A pure float32 sum would lose a digit or two, so float64 adds the blocks.
    whole = difference.shape[2] // TERMS_PER_SUM * TERMS_PER_SUM
    blocks = torch.linalg.vector_norm(
        difference[..., :whole].unflatten(2, (-1, TERMS_PER_SUM)), dim=3
    )
    rest = torch.linalg.vector_norm(difference[..., whole:], dim=2)
    return blocks.double().square().sum(2) + rest.double().square()


def cross_sq_dist(z: Tensor, x: Tensor) -> Tensor:
    """Return ‖z − x‖² between every z (B, d) and every x (N, d), (B, N) float64, computed as ‖z‖² + ‖x‖² − 2 z·x.

    At small t (t_min = 0.002) this form would lose all digits in float32; in float64 it keeps about nine. Rounding may
    make tiny values negative.
    """
    z, x = z.double(), x.double()
    norms = z.square().sum(1, keepdim=True) + x.square().sum(1)
    return torch.addmm(norms, z, x.T, alpha=-2.0)


def unnormalised_log_likelihood(sq_dist: Tensor, t: Tensor | float) -> Tensor:
    """Return log p_t(z|x) without the Gaussian's constant: −‖z − x‖² / 2t², (B, n) float64 (line 2 of Algorithm 1).

    The constant is the same for all x, so posteriors, proposals and importance weights do not need it.

    Args:
        sq_dist: (B, n), squared L2, model space.
        t: (B,) or scalar, t > 0.
    """
    t = torch.as_tensor(t, dtype=torch.float64, device=sq_dist.device).reshape(-1, 1)
    return sq_dist.double() / (-2.0 * t.square())


def log_posterior(sq_dist: Tensor, t: Tensor | float) -> Tensor:
    """Return log p_t(x_i|z), (B, N) float64, Eq. 2 (eq:posterior), from the squared distances to all N images."""
    return torch.log_softmax(unnormalised_log_likelihood(sq_dist, t), dim=1)


def posterior_mean(z: Tensor, x: Tensor, t: Tensor | float) -> Tensor:
    """Return E[x|z,t], (B, *shape) float64, Eq. 8 (eq:posterior_mean), summed over a set x (N, *shape) in memory.

    `lit_knn.estimators.Exact` streams over a set of any size.

    Args:
        z: (B, *shape).
        x: (N, *shape).
        t: (B,) or scalar, t > 0.
    """
    weights = log_posterior(cross_sq_dist(z.flatten(1), x.flatten(1)), t).exp()
    return (weights @ x.flatten(1).double()).reshape(z.shape)


def score_from_mean(
    mu: Tensor, z: Tensor, t: Tensor | float, process: Process = EDM_PROCESS
) -> Tensor:
    """Return the score ∇ log p_t(z) = (s·E[x|z/s,σ] − z) / (s·σ)², (B, *shape) (appendix, ap:general_diffusion).

    In the EDM process (s(t) = 1, σ(t) = t) it is (E[x|z,t] − z) / t², Eq. 5 (eq:clean_score).

    Args:
        mu: (B, *shape), the exact or estimated posterior mean of the clean x.
        z: (B, *shape).
        t: (B,) or scalar, t > 0.
        process: the noise process.
    """
    t = per_item(t, z)
    return (process.scale(t) * mu - z) / process.noise_std(t).square()
