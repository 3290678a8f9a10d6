"""Theorems 4.1 (thm:knn_bound) and 4.2 (thm:knn_vs_stf): variance bounds of the nearest-neighbour estimator.

The bounds concern traces of the asymptotic covariance, Eq. 12 (eq:SNIS_Var). Here p_t(z) is the plain sum of the
likelihoods over the data set. With the 1/N of Eq. 1, Theorem 4.2 would not hold. All functions enumerate the N images
in log space, so nothing underflows at small t.
"""

import math

import torch
from torch import Tensor


def snis_trace(
    log_posterior: Tensor, log_q: Tensor | float, sq_deviation: Tensor, n: int
) -> Tensor:
    """Return the covariance trace of the SNIS mean, Eq. 12 (eq:SNIS_Var): (1/n) Σ_i p_i²/q_i ‖x_i − μ‖², (B,).

    Args:
        log_posterior: (B, N), log p_t(x_i|z) of Eq. 2.
        log_q: (B, N) or scalar, log-probabilities of the proposal.
        sq_deviation: (B, N), ‖x_i − μ‖² with the exact posterior mean μ of each z.
        n: number of draws.
    """
    return ((2 * log_posterior - log_q).exp() * sq_deviation).sum(1) / n


def monte_carlo_trace(log_posterior: Tensor, sq_deviation: Tensor, n: int) -> Tensor:
    """Return Tr Cov(μ̂_MC) for n draws from the posterior (Eq. 9, eq:simple_mc), (B,).

    Args:
        log_posterior: (B, N), as in `snis_trace`.
        sq_deviation: (B, N), as in `snis_trace`.
        n: number of draws.
    """
    return snis_trace(log_posterior, log_posterior, sq_deviation, n)


def uniform_trace(log_posterior: Tensor, sq_deviation: Tensor, n: int) -> Tensor:
    """Return Tr Cov(μ̂_U) for SNIS with q = 1/N (eq:uniform_trace), (B,).

    Args:
        log_posterior: (B, N), as in `snis_trace`.
        sq_deviation: (B, N), as in `snis_trace`.
        n: number of draws.
    """
    return snis_trace(log_posterior, -math.log(log_posterior.shape[1]), sq_deviation, n)


def normaliser_ratio(log_likelihood: Tensor, log_Zq: Tensor) -> Tensor:
    """Return Z_q / p_t(z), (B,). This ratio is at least 1 if q is built from the k nearest images.

    Args:
        log_likelihood: (B, N), log p_t(z|x_i) up to a constant of each row.
        log_Zq: (B,), log of the normaliser in Eq. 13 (eq:proposal), up to the same constant.
    """
    return (log_Zq - torch.logsumexp(log_likelihood, dim=1)).exp()


def theorem_4_1_bound(ratio: Tensor, trace_mc: Tensor) -> Tensor:
    """Return the bound of Theorem 4.1 (thm:knn_bound), (B,): `normaliser_ratio` times `monte_carlo_trace`."""
    return ratio * trace_mc


def theorem_4_2_bound(
    neighbour_mass: Tensor, trace_mc: Tensor, trace_uniform: Tensor, k: int, N: int
) -> Tensor:
    """Return the bound of Theorem 4.2 (thm:knn_vs_stf), (B,), for k neighbours among N images.

    It is (1 − Σ_{x ∉ K} p_t(z|x) / p_t(z)) · Tr Cov(μ̂_MC) + (N − k)/N · Tr Cov(μ̂_U).

    Args:
        neighbour_mass: (B,), the factor in brackets, the posterior probability of the neighbours.
        trace_mc: (B,), `monte_carlo_trace`.
        trace_uniform: (B,), `uniform_trace`.
        k: number of neighbours.
        N: number of images.
    """
    return neighbour_mass * trace_mc + (N - k) / N * trace_uniform
