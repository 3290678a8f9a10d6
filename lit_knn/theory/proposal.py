"""The nearest-neighbour proposal, Eq. 13 (eq:proposal): its log-probabilities, normaliser and sampling."""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lit_knn.theory.posterior import unnormalised_log_likelihood

# `id & FAR_ID` is the id itself, or this number for the missing id −1.
FAR_ID = 2**62 - 1


class Proposal(NamedTuple):
    """q_t(x|z) over N images: the neighbours' likelihoods, and one flat value for all other images (the tail).

    Attributes:
        ids: (B, k), neighbours' ids; −1 where the search found fewer than k.
        log_q_padded: (B, k + 1), float64, log q of each neighbour, −inf where `ids` is −1. The last column is log q of
            any one image in the tail.
        tail_size: (B, 1), float64, number of images in the tail.
        log_Zq: (B,), log of the normaliser Z_q of the unnormalised likelihoods exp(−‖z − x‖²/2t²), float64.
        N: number of images; (B, 1) if each row has its own.
    """

    ids: Tensor
    log_q_padded: Tensor
    tail_size: Tensor
    log_Zq: Tensor
    N: int | Tensor

    @property
    def log_q(self) -> Tensor:
        """Log q of each neighbour, (B, k), float64; −inf where `ids` is −1."""
        return self.log_q_padded[:, :-1]


def neighbour_proposal(
    sq_dist: Tensor, ids: Tensor, t: Tensor | float, N: int | Tensor
) -> Proposal:
    """Build the normalised q_t(x|z) of Eq. 13 (eq:proposal) from the result of a neighbour search.

    The distances may be approximate and in any order, and neighbours may be missing (id −1). q still has full support
    on the N images, so importance weights p/q remain valid. Each tail image gets the likelihood of the farthest
    neighbour found. If none was found, q is uniform.

    Args:
        sq_dist: (B, k), squared L2, model space.
        ids: (B, k), distinct ids in [0, N), or −1 for a missing neighbour.
        t: (B,) or scalar, t > 0.
        N: number of images; (B, 1) if each row has its own.
    """
    missing = ids < 0
    log_neighbour = unnormalised_log_likelihood(sq_dist, t).masked_fill_(missing, -math.inf)
    # A missing neighbour counts as likelihood 1 here, so it sets the minimum only if no neighbour was found.
    log_tail = log_neighbour.masked_fill(missing, 0.0).amin(1, keepdim=True)
    tail_size = missing.sum(1, keepdim=True, dtype=torch.float64).add_(N - ids.shape[1])
    log_Zq = torch.logaddexp(
        torch.logsumexp(log_neighbour, dim=1, keepdim=True), log_tail + tail_size.log()
    )
    log_q_padded = torch.cat([log_neighbour, log_tail], 1).sub_(log_Zq)
    return Proposal(ids, log_q_padded, tail_size, log_Zq.squeeze(1), N)


def dense_log_q(proposal: Proposal) -> Tensor:
    """Expand log q to all N images, for enumeration: (B, N), float64. All rows must have the same N."""
    assert isinstance(proposal.N, int)
    dense = proposal.log_q_padded[:, -1:].repeat(1, proposal.N + 1)
    # Missing neighbours write into an extra column, which is cut off.
    columns = torch.where(proposal.ids >= 0, proposal.ids, proposal.N)
    return dense.scatter(1, columns, proposal.log_q)[:, : proposal.N]


def sample_proposal(
    proposal: Proposal, n: int, generator: Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw n independent images from the proposal of each z (line 5 of Algorithm 1).

    Each draw inverts the cumulative distribution to pick a neighbour or "the tail". In the tail it then picks one
    image uniformly.

    Args:
        proposal: of B latents.
        n: draws for each z.
        generator: on the device of the proposal.

    Returns:
        `ids` (B, n) in [0, N), and `log_q` (B, n), float64, the log-probability of each draw.
    """
    q = proposal.log_q_padded.exp()
    q[:, -1:].mul_(proposal.tail_size)
    cdf = q.cumsum(1)
    # Dividing makes the last entry exactly 1, so u < 1 never picks a category without mass.
    cdf = cdf / cdf[:, -1:]
    # `tail_share` places a draw within the tail.
    u, tail_share = torch.rand(
        2, len(cdf), n, dtype=torch.float64, device=cdf.device, generator=generator
    )
    column = torch.searchsorted(cdf, u, right=True)
    return _ids_of(proposal, column, tail_share), proposal.log_q_padded.gather(1, column)


def _ids_of(proposal: Proposal, column: Tensor, tail_share: Tensor) -> Tensor:
    """Return the ids of columns (B, n) of `log_q_padded`, (B, n).

    `tail_share` (B, n), in [0, 1), is the relative position of a tail draw, when the tail is sorted by id. If the
    neighbours' sorted ids are s_0 < s_1 < …, the r-th tail image has id r + j, where j counts the neighbours with
    s_j − j ≤ r.
    """
    ids = torch.nn.functional.pad(proposal.ids, (0, 1), value=-1).gather(1, column)
    # A share below 1 gives a product below `tail_size`, also after rounding.
    rank = (tail_share * proposal.tail_size).long()
    # Missing neighbours, −1, get an id that sorts after every rank.
    ordered = (proposal.ids & FAR_ID).sort(1).values
    gaps = ordered - torch.arange(ordered.shape[1], device=ids.device)
    return torch.where(ids < 0, rank + torch.searchsorted(gaps, rank, right=True), ids)
