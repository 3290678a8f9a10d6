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
# `id & FAR_ID` is the id itself, or this number for the missing id −1.
FAR_ID = 2**62 - 1
# Largest float64 below 1.
BELOW_1 = 1 - 2**-53


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

    @property
    def log_q_tail(self) -> Tensor:
        """Log q of any one image in the tail, (B,), float64."""
        return self.log_q_padded[:, -1]


def neighbour_proposal(sq_dist: Tensor, ids: Tensor, t: Tensor | float, N: int | Tensor) -> Proposal:
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
    # A missing neighbour counts as likelihood 1 here, so it is the farthest only if none was found.
    log_tail = log_neighbour.masked_fill(missing, 0.0).amin(1, keepdim=True)
    tail_size = missing.sum(1, keepdim=True, dtype=torch.float64).add_(N - ids.shape[1])
    log_Zq = torch.logaddexp(torch.logsumexp(log_neighbour, dim=1, keepdim=True), log_tail + tail_size.log())
    log_q_padded = torch.cat([log_neighbour, log_tail], 1).sub_(log_Zq)
    return Proposal(ids, log_q_padded, tail_size, log_Zq.squeeze(1), N)


def dense_log_q(proposal: Proposal) -> Tensor:
    """Expand log q to all N images, for enumeration: (B, N), float64. All rows must have the same N."""
    assert isinstance(proposal.N, int)
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
    q = proposal.log_q_padded.exp()
    q[:, -1:].mul_(proposal.tail_size)
    cdf = q.cumsum(1)
    # Dividing makes the last entry exactly 1, so u < 1 never picks a category without mass.
    cdf = cdf / cdf[:, -1:]
    # `tail_share` places a draw within the tail.
    u, tail_share = torch.rand(2, len(cdf), n, dtype=torch.float64, device=cdf.device, generator=generator)
    column = torch.searchsorted(cdf, u, right=True)
    return _ids_of(proposal, column, tail_share), proposal.log_q_padded.gather(1, column)


def _ids_of(proposal: Proposal, column: Tensor, tail_share: Tensor) -> Tensor:
    """Return the ids of columns (B, n) of `log_q_padded`, (B, n).

    `tail_share` (B, n), in [0, 1), is the relative position of a draw from the tail in the tail sorted by id. If the
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


def stratified_sample_proposal(proposal: Proposal, n: int, generator: torch.Generator | None = None) -> StratifiedDraws:
    """Draw n images per z without repetition: keep the sure neighbours and sample the rest systematically.

    The expected base weight of every image is its probability under Eq. 13 (eq:proposal). A neighbour is kept if n
    draws without repetition are sure to contain it. The other places are spread evenly over the rest of the proposal:
    the other neighbours in the order of the search (decreasing probability), then the flat tail by id.

    Args:
        proposal: proposals of B latents, all with the same N.
        n: draws per latent, n <= N; n = N takes every image, without randomness.
        generator: on the device of the proposal.
    """
    assert isinstance(proposal.N, int)
    if n == proposal.N:
        return _all_images(proposal, n)
    k = proposal.ids.shape[1]
    top, kept, used = _largest(proposal, n, proposal.N)
    is_kept = torch.arange(n, device=top.device) < kept.unsqueeze(1)
    # Places that are not kept write into an extra column, which becomes the tail.
    columns = torch.where(is_kept, top, k)
    log_rest = proposal.log_q_padded.scatter(1, columns, -math.inf)
    log_q_tail = proposal.log_q_padded[:, -1:]
    torch.add(log_q_tail, proposal.tail_size.log(), out=log_rest[:, -1:])
    # Dividing the rest by its largest value keeps it from underflowing.
    largest = log_rest.amax(1, keepdim=True)
    rest = log_rest.sub_(largest).exp_()
    image_q = torch.cat([rest[:, :-1], (log_q_tail - largest).exp_()], 1)
    draws, heights = systematic_draws(top, kept, used, rest, image_q, generator)

    tail_share = (heights - rest[:, :-1].sum(1, keepdim=True)) / rest[:, -1:].clamp(min=torch.finfo(rest.dtype).tiny)
    return draws._replace(ids=_ids_of(proposal, draws.ids, tail_share.clamp(0, BELOW_1)))


def _largest(proposal: Proposal, n: int, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns of the n likeliest neighbours (B, n), padded with k, and counts of kept and used places, (B,)."""
    k, log_q_tail = proposal.ids.shape[1], proposal.log_q_padded[:, -1:]
    log_top, top = proposal.log_q.topk(min(n, k), dim=1)
    beyond = n - top.shape[1]
    # Tail images fill the places after the neighbours, and replace missing neighbours.
    log_top = torch.cat([torch.maximum(log_top, log_q_tail), log_q_tail.expand(-1, beyond)], dim=1)
    used = num_used(log_top, N, math.log(NEGLIGIBLE_SHARE))
    kept = torch.where(used < n, used, num_sure(log_top.exp()))
    num_found = (N - proposal.tail_size).long().squeeze(1)
    return torch.nn.functional.pad(top, (0, beyond), value=k), torch.minimum(kept, num_found), used


def _all_images(proposal: Proposal, N: int) -> StratifiedDraws:
    """Draw every image of the set once. Each image stands only for itself."""
    batch, device = len(proposal.ids), proposal.ids.device
    nothing = torch.zeros(batch, N, dtype=torch.float64, device=device)
    ids, used = torch.arange(N, device=device).expand(batch, N), torch.full((batch,), N, device=device)
    return StratifiedDraws(ids, nothing, nothing.bool(), used, nothing)
