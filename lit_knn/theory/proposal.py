"""The nearest-neighbour proposal, Eq. 13 (eq:proposal): its log-probabilities, normaliser and sampling."""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lit_knn.theory.posterior import unnormalised_log_likelihood

# This id is above that of every image. It replaces the id −1 of a missing neighbour where ids are sorted.
FAR_ID = 2**62 - 1


class Proposal(NamedTuple):
    """q_t(x|z) over N images: the neighbours' likelihoods, and one equal value for each other image (the tail).

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

    These are lines 2 to 4 of Algorithm 1. The distances may be approximate and in any order, and neighbours may be
    missing (id −1). q is still above 0 for all N images, so importance weights p/q remain valid. Each tail image gets
    the likelihood of the farthest neighbour found, x_k in the paper. If none was found, q is uniform.

    Args:
        sq_dist: (B, k), squared L2, model space.
        ids: (B, k), distinct ids in [0, N), or −1 for a missing neighbour.
        t: (B,) or scalar, t > 0.
        N: number of images; (B, 1) if each row has its own.
    """
    missing = ids < 0
    log_neighbour = unnormalised_log_likelihood(sq_dist, t).masked_fill_(missing, -math.inf)
    # The paper's x_k is the minimum, not the last column, because the neighbours need not be in order. Log-likelihoods
    # are at most 0, so a missing neighbour, which gets 0 here, is the minimum only if no neighbour was found.
    log_tail = log_neighbour.masked_fill(missing, 0.0).amin(1, keepdim=True)
    tail_size = N - (~missing).sum(1, keepdim=True, dtype=torch.float64)
    log_Zq = torch.logaddexp(
        torch.logsumexp(log_neighbour, dim=1, keepdim=True), log_tail + tail_size.log()
    )
    log_q_padded = torch.cat([log_neighbour, log_tail], 1).sub_(log_Zq)
    return Proposal(ids, log_q_padded, tail_size, log_Zq.squeeze(1), N)


def dense_log_q(proposal: Proposal) -> Tensor:
    """Return log q of each of the N images, (B, N), float64. All rows must have the same N."""
    assert isinstance(proposal.N, int)
    dense = proposal.log_q_padded[:, -1:].repeat(1, proposal.N + 1)
    # Missing neighbours write into an extra column, which is cut off.
    columns = torch.where(proposal.ids >= 0, proposal.ids, proposal.N)
    return dense.scatter(1, columns, proposal.log_q)[:, : proposal.N]


def sample_proposal(
    proposal: Proposal, n: int, generator: Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw n independent images from the proposal of each z (line 5 of Algorithm 1).

    A first random number picks a neighbour or the tail as a whole, by the inverse of the cumulative distribution. A
    second one picks an image of the tail, where all have the same probability.

    Args:
        proposal: of B latents.
        n: draws for each z.
        generator: on the device of the proposal.

    Returns:
        `ids` (B, n) in [0, N), and `log_q` (B, n), float64, the log-probability of each draw.
    """
    q = proposal.log_q_padded.exp()
    # The last column now stands for the whole tail.
    q[:, -1:].mul_(proposal.tail_size)
    cdf = q.cumsum(1)
    # Dividing makes the last entry exactly 1, so u < 1 never picks a category without mass.
    cdf = cdf / cdf[:, -1:]
    # `tail_share` is the position of a draw within the tail.
    u, tail_share = torch.rand(
        2, len(cdf), n, dtype=torch.float64, device=cdf.device, generator=generator
    )
    column = torch.searchsorted(cdf, u, right=True)
    return _ids_of(proposal, column, tail_share), proposal.log_q_padded.gather(1, column)


def _ids_of(proposal: Proposal, column: Tensor, tail_share: Tensor) -> Tensor:
    """Return the ids of the images that were drawn, (B, n).

    The tail is sorted by id. Let s_0 < s_1 < … be the sorted ids of the neighbours. Then s_j − j images of the tail
    have an id below s_j. So the tail image of rank r, counted from 0, has the id r plus the number of the neighbours
    with s_j − j ≤ r. For example, the neighbours 1 and 4 of N = 6 images leave the tail 0, 2, 3, 5, where the image of
    rank 1 has the id 2.

    Args:
        proposal: of B latents.
        column: (B, n), the drawn columns of `log_q_padded`. The last column is the tail.
        tail_share: (B, n), in [0, 1), the position of a draw within the tail, as a share of the tail's size.
    """
    # Only the tail gets −1 here, because a missing neighbour has probability 0 and is never drawn.
    ids = torch.nn.functional.pad(proposal.ids, (0, 1), value=-1).gather(1, column)
    # A share below 1 gives a product below `tail_size`, also after rounding.
    rank = (tail_share * proposal.tail_size).long()

    neighbours = torch.where(proposal.ids < 0, FAR_ID, proposal.ids).sort(1).values
    # If several neighbours are missing, the last columns descend, but all of them are above every rank.
    tail_ids_below = neighbours - torch.arange(neighbours.shape[1], device=ids.device)
    neighbours_before = torch.searchsorted(tail_ids_below, rank, right=True)
    return torch.where(ids < 0, rank + neighbours_before, ids)
