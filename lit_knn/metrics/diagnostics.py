"""Diagnoses the neighbour search and tests the paper's theorems by enumerating the whole reference set."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.estimators import KNN
from lit_knn.reference.streaming import all_sq_dist, batches_of, stream_sq_dist
from lit_knn.theory import bounds
from lit_knn.theory.posterior import log_posterior, unnormalised_log_likelihood
from lit_knn.theory.proposal import dense_log_q


class SearchDiagnostics(NamedTuple):
    """Results for the nearest-neighbour estimator at each z, (B,) float64. Variances are traces divided by d."""

    recall: Tensor  # share of the k nearest images that the search found
    found_mass: Tensor  # posterior probability of the found images
    normaliser_ratio: Tensor  # Z_q / p_t(z)
    # Eq. 12 (eq:SNIS_Var) with the proposal of the search, the left-hand side of both theorems
    eq12_variance: Tensor
    bound_4_1: Tensor  # right-hand side of Theorem 4.1
    bound_4_2: Tensor  # right-hand side of Theorem 4.2


@torch.no_grad()
def search_diagnostics(estimator: KNN, z: Tensor, t: float, mu: Tensor) -> SearchDiagnostics:
    """Enumerate the posterior and the proposal at each z (B, *shape); this costs three products with all images.

    The theorems assume exact search. The proposal is that of the search alone, even if the
    estimator adds the source of z to it.

    Args:
        estimator: the estimator, bound to its reference set.
        z: (B, *shape), noisy latents.
        t: their noise level.
        mu: (B, *shape), float64, the exact mean.
    """
    parts = []
    for rows in batches_of(z, estimator.reference.N):
        parts.append(_diagnose(estimator, z[rows], t, mu[rows]))

    columns = zip(*parts, strict=True)
    return SearchDiagnostics._make(torch.cat(column) for column in columns)


def _diagnose(estimator: KNN, z: Tensor, t: float, mu: Tensor) -> SearchDiagnostics:
    """Diagnose one batch of latents, with the arguments of `search_diagnostics`."""
    reference, k, n = estimator.reference, estimator.k, estimator.n
    levels = torch.full((len(z),), t, dtype=torch.float64, device=z.device)
    proposal = estimator.proposal(z, levels)
    sq_dist = all_sq_dist(reference, z)
    sq_deviation = torch.empty_like(sq_dist)
    log_p = log_posterior(sq_dist, t)

    # At the likeliest image x, where p²/q may be huge, subtracting x from μ would lose digits. So μ − x is added up
    # from the other images: the sum of p_i·(x_i − x).
    best = log_p.argmax(1, keepdim=True)
    rest = log_p.exp().scatter(1, best, 0.0)
    shift = -rest.sum(1, keepdim=True) * reference.take(best).flatten(1)
    for rows, x, sq_dist_to_mu in stream_sq_dist(reference, mu):
        sq_deviation[:, rows] = sq_dist_to_mu
        shift += rest[:, rows] @ x.double()
    sq_deviation.scatter_(1, best, shift.square().sum(1, keepdim=True))

    # Where the search found no neighbour, the id is −1.
    is_neighbour = proposal.ids >= 0
    ids = proposal.ids.clamp(min=0)
    # Neighbours are counted by distance, not by id, because several images may be at the k-th distance.
    farthest = sq_dist.kthvalue(k, dim=1, keepdim=True).values
    recall = ((sq_dist.gather(1, ids) <= farthest) & is_neighbour).double().mean(1)
    found_mass = torch.where(is_neighbour, log_p.gather(1, ids).exp(), 0.0).sum(1)

    ratio = bounds.normaliser_ratio(unnormalised_log_likelihood(sq_dist, t), proposal.log_Zq)
    trace_mc = bounds.monte_carlo_trace(log_p, sq_deviation, n)
    trace_uniform = bounds.uniform_trace(log_p, sq_deviation, n)
    traces = (
        bounds.snis_trace(log_p, dense_log_q(proposal), sq_deviation, n),
        bounds.theorem_4_1_bound(ratio, trace_mc),
        bounds.theorem_4_2_bound(found_mass, trace_mc, trace_uniform, k, reference.N),
    )
    variance, bound_4_1, bound_4_2 = (trace / reference.d for trace in traces)
    return SearchDiagnostics(recall, found_mass, ratio, variance, bound_4_1, bound_4_2)
