"""The nearest-neighbour proposal, Eq. 13 (eq:proposal): its log-probabilities, normaliser and sampling."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.stratified import StratifiedDraws, num_sure, num_used, systematic_draws

# Draws without repetition skip images that together have less than this share of the proposal. The chance that one of
# n independent draws hits a skipped image is at most n times this share.
NEGLIGIBLE_SHARE = 1e-16


class Proposal(NamedTuple):
    """q_t(x|z) over N images: the neighbours' likelihoods, and one flat value for all other images (the tail).

    Attributes:
        ids: (B, k), neighbours' ids; −1 where the search found fewer than k.
        log_q: (B, k), log q of each neighbour, float64; −inf where `ids` is −1.
        log_q_tail: (B,), log q of any one image in the tail, float64.
        log_Zq: (B,), log of the normaliser Z_q of the unnormalised likelihoods exp(−‖z − x‖²/2t²), float64.
        N: number of images.
    """

    ids: Tensor
    log_q: Tensor
    log_q_tail: Tensor
    log_Zq: Tensor
    N: int


def neighbour_proposal(sq_dist: Tensor, ids: Tensor, t: Tensor | float, N: int) -> Proposal:
    """Build the normalised q_t(x|z) of Eq. 13 (eq:proposal) from the result of a neighbour search.

    The distances may be approximate and in any order, and neighbours may be missing (id −1). q still has full support
    on the N images, so importance weights p/q remain valid. Each tail image gets the likelihood of the farthest
    neighbour found. If none was found, q is uniform.

    Args:
        sq_dist: (B, k), squared L2, model space.
        ids: (B, k), distinct ids in [0, N), or −1 for a missing neighbour.
        t: (B,) or scalar, t > 0.
        N: number of images.
    """
    found = ids >= 0
    log_neighbour = unnormalised_log_likelihood(sq_dist, t).masked_fill(~found, -math.inf)
    log_tail = log_neighbour.masked_fill(~found, math.inf).amin(1)
    log_tail = torch.where(found.any(1), log_tail, 0.0)
    tail_size = N - found.sum(1)
    log_tail_mass = log_tail + tail_size.double().log()
    log_Zq = torch.logaddexp(torch.logsumexp(log_neighbour, dim=1), log_tail_mass)
    return Proposal(ids, log_neighbour - log_Zq.unsqueeze(1), log_tail - log_Zq, log_Zq, N)


def dense_log_q(proposal: Proposal) -> Tensor:
    """Expand log q to all N images, for enumeration: (B, N), float64."""
    dense = proposal.log_q_tail.unsqueeze(1).repeat(1, proposal.N + 1)
    # Missing neighbours write into an extra column, which is cut off.
    columns = torch.where(proposal.ids >= 0, proposal.ids, proposal.N)
    return dense.scatter(1, columns, proposal.log_q)[:, : proposal.N]


def sample_proposal(proposal: Proposal, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw n independent images from the proposal of each z (line 5 of Algorithm 1).

    Each draw inverts the cumulative distribution to pick a neighbour or "the tail". In the tail it then picks one
    image uniformly.

    Args:
        proposal: proposals of B latents.
        n: draws per latent.
        generator: on the device of the proposal.

    Returns:
        `ids` (B, n) in [0, N), and `log_q` (B, n), float64, the log-probability of each draw.
    """
    log_tail_mass = proposal.log_q_tail.unsqueeze(1) + _tail_size(proposal).double().log()
    cdf = torch.cat([proposal.log_q, log_tail_mass], dim=1).exp().cumsum(1)
    # Dividing makes the last entry exactly 1, so u < 1 never picks a category without mass.
    cdf = cdf / cdf[:, -1:]
    # `tail_share` places a draw within the tail.
    u, tail_share = (
        torch.rand(len(cdf), n, dtype=torch.float64, device=cdf.device, generator=generator) for _ in range(2)
    )
    column = torch.searchsorted(cdf, u, right=True)
    in_tail = column == proposal.ids.shape[1]

    padded_ids = torch.nn.functional.pad(proposal.ids, (0, 1), value=-1)
    padded_log_q = torch.cat([proposal.log_q, proposal.log_q_tail.unsqueeze(1)], dim=1)
    ids = torch.where(in_tail, _tail_ids(proposal, tail_share), padded_ids.gather(1, column))
    return ids, padded_log_q.gather(1, column)


def _tail_ids(proposal: Proposal, share: Tensor) -> Tensor:
    """Return ids of the tail images at relative positions `share` (B, n), from 0 to 1, in the tail sorted by id.

    If the neighbours' sorted ids are s_0 < s_1 < …, the r-th tail image has id r + j, where j counts the neighbours
    with s_j − j ≤ r.
    """
    ids, tail_size = proposal.ids, _tail_size(proposal)
    # The product may round up to tail_size itself.
    rank = torch.minimum((share * tail_size).long(), (tail_size - 1).clamp(min=0))
    # Missing neighbours get an id that sorts after every rank.
    ordered = torch.where(ids >= 0, ids, 2 * proposal.N).sort(1).values
    gaps = ordered - torch.arange(ids.shape[1], device=ids.device)
    return rank + torch.searchsorted(gaps, rank, right=True)


def stratified_sample_proposal(proposal: Proposal, n: int, generator: torch.Generator | None = None) -> StratifiedDraws:
    """Draw n images per z without repetition: keep the sure neighbours and sample the rest systematically.

    The expected base weight of every image is its probability under Eq. 13 (eq:proposal). A neighbour is kept if n
    draws without repetition are sure to contain it. The other places are spread evenly over the rest of the proposal:
    the other neighbours in the order of the search (decreasing probability), then the flat tail by id.

    Args:
        proposal: proposals of B latents.
        n: draws per latent, n <= N; n = N takes every image, without randomness.
        generator: on the device of the proposal.
    """
    if n == proposal.N:
        return _all_images(proposal)
    k = proposal.ids.shape[1]
    top, kept, used = _largest(proposal, n)
    is_kept = torch.arange(n, device=top.device) < kept.unsqueeze(1)
    # Places that are not kept write into an extra column, which is cut off.
    columns = torch.where(is_kept, top, k)
    log_rest = torch.nn.functional.pad(proposal.log_q, (0, 1)).scatter(1, columns, -math.inf)[:, :k]
    num_tail, log_q_tail = _tail_size(proposal), proposal.log_q_tail.unsqueeze(1)
    log_tail_mass = log_q_tail + num_tail.double().log()
    # Dividing the rest by its largest value keeps it from underflowing.
    largest = torch.maximum(log_rest.amax(1, keepdim=True), log_tail_mass)
    rest, image_q = ((torch.cat([log_rest, tail], 1) - largest).exp() for tail in (log_tail_mass, log_q_tail))
    draws, heights = systematic_draws(top, kept, used, rest, image_q, generator)

    tail_share = (heights - rest[:, :-1].sum(1, keepdim=True)) / rest[:, -1:].clamp(min=torch.finfo(rest.dtype).tiny)
    own_ids = torch.nn.functional.pad(proposal.ids, (0, 1), value=-1).gather(1, draws.ids)
    tail_ids = _tail_ids(proposal, tail_share.clamp(0, 1))
    return draws._replace(ids=torch.where(draws.ids == k, tail_ids, own_ids))


def _largest(proposal: Proposal, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns of the n likeliest neighbours (B, n), padded with k, and counts of kept and used places, (B,)."""
    k, log_q_tail = proposal.ids.shape[1], proposal.log_q_tail.unsqueeze(1)
    log_top, top = proposal.log_q.topk(min(n, k), dim=1)
    beyond = n - top.shape[1]
    # Tail images fill the places after the neighbours, and replace missing neighbours.
    log_top = torch.cat([torch.maximum(log_top, log_q_tail), log_q_tail.expand(-1, beyond)], dim=1)
    used = num_used(log_top, proposal.N, torch.full_like(proposal.log_Zq, math.log(NEGLIGIBLE_SHARE)))
    kept = torch.where(used < n, used, num_sure(log_top.exp()))
    num_found = (proposal.ids >= 0).sum(1)
    return torch.nn.functional.pad(top, (0, beyond), value=k), torch.minimum(kept, num_found), used


def _all_images(proposal: Proposal) -> StratifiedDraws:
    """Draw every image of the set once. Each image stands only for itself."""
    batch, N, device = len(proposal.ids), proposal.N, proposal.ids.device
    nothing = torch.zeros(batch, N, dtype=torch.float64, device=device)
    ids, used = torch.arange(N, device=device).expand(batch, N), torch.full((batch,), N, device=device)
    return StratifiedDraws(ids, nothing, nothing.bool(), used, nothing)


def _tail_size(proposal: Proposal) -> Tensor:
    """Number of images in the tail, (B, 1)."""
    return proposal.N - (proposal.ids >= 0).sum(1, keepdim=True)
