"""The nearest-neighbour proposal, Eq. 13 (eq:proposal): its log-probabilities, normaliser and sampling."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.posterior import unnormalised_log_likelihood


class Proposal(NamedTuple):
    """q_t(x|z) over N images: the neighbours' likelihoods and one flat value for all the others.

    Attributes:
        ids: (B, k), neighbours' ids; −1 where the search found fewer than k.
        log_q: (B, k), log q of each neighbour, float64; −inf where `ids` is −1.
        log_q_tail: (B,), log q of each single image that is not a neighbour, float64.
        log_Zq: (B,), log of the normaliser Z_q of the unnormalised likelihoods exp(−‖z − x‖²/2t²), float64.
        N: number of images.
    """

    ids: Tensor
    log_q: Tensor
    log_q_tail: Tensor
    log_Zq: Tensor
    N: int


def neighbour_proposal(sq_dist: Tensor, ids: Tensor, t: Tensor | float, N: int) -> Proposal:
    """Build q_t(x|z) of Eq. 13 (eq:proposal) from the result of a neighbour search.

    The distances may be approximate and in any order, and neighbours may be missing (id −1): q stays a
    distribution with full support on the N images, so importance weights p/q remain valid. The tail takes the
    likelihood of the farthest neighbour found; where none was found at all, q is uniform.

    Args:
        sq_dist: (B, k), squared L2, model space.
        ids: (B, k), distinct ids in [0, N), or −1 for a missing neighbour.
        t: (B,) or scalar, t > 0.
        N: number of images.

    Returns:
        The normalised proposal.
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
    """log q of all N images, for enumeration; (B, N), float64."""
    dense = proposal.log_q_tail.unsqueeze(1).repeat(1, proposal.N + 1)
    # Missing neighbours write into a column that is cut off.
    columns = torch.where(proposal.ids >= 0, proposal.ids, proposal.N)
    return dense.scatter(1, columns, proposal.log_q)[:, : proposal.N]


def sample_proposal(proposal: Proposal, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw n independent images from the proposal of each z (line 5 of Algorithm 1).

    A draw first picks a neighbour or "the tail" by inverting the cumulative distribution, then, in the tail,
    one of the images that are not neighbours, uniformly.

    Args:
        proposal: of B latents.
        n: draws per latent.
        generator: on the device of the proposal.

    Returns:
        `ids` (B, n) in [0, N), and `log_q` (B, n), float64, the log-probability of each draw.
    """
    device, batch = proposal.log_q.device, proposal.log_q.shape[0]
    tail_size = proposal.N - (proposal.ids >= 0).sum(1, keepdim=True)
    log_tail_mass = proposal.log_q_tail.unsqueeze(1) + tail_size.double().log()
    cdf = torch.cat([proposal.log_q, log_tail_mass], dim=1).exp().cumsum(1)
    # Dividing makes the last entry exactly 1, so that a u < 1 never lands on a category of no mass.
    cdf = cdf / cdf[:, -1:]
    u = torch.rand(batch, n, dtype=torch.float64, device=device, generator=generator)
    column = torch.searchsorted(cdf, u, right=True)
    in_tail = column == proposal.ids.shape[1]

    padded_ids = torch.nn.functional.pad(proposal.ids, (0, 1), value=-1)
    padded_log_q = torch.cat([proposal.log_q, proposal.log_q_tail.unsqueeze(1)], dim=1)
    ids = torch.where(in_tail, _sample_tail(proposal, n, generator), padded_ids.gather(1, column))
    return ids, padded_log_q.gather(1, column)


def _sample_tail(proposal: Proposal, n: int, generator: torch.Generator | None) -> Tensor:
    """Draw n ids per row uniformly from those that are not neighbours; (B, n), arbitrary where there are none.

    With the neighbours' ids sorted as s_0 < s_1 < …, the r-th image that is not a neighbour has id r + j, where
    j counts the neighbours with s_j − j ≤ r.
    """
    ids, N = proposal.ids, proposal.N
    batch, k = ids.shape
    tail_size = N - (ids >= 0).sum(1, keepdim=True)
    u = torch.rand(batch, n, dtype=torch.float64, device=ids.device, generator=generator)
    # The product may round up to tail_size itself.
    rank = torch.minimum((u * tail_size).long(), (tail_size - 1).clamp(min=0))
    # A missing neighbour sorts behind every rank.
    ordered = torch.where(ids >= 0, ids, 2 * N).sort(1).values
    gaps = ordered - torch.arange(k, device=ids.device)
    return rank + torch.searchsorted(gaps, rank, right=True)
