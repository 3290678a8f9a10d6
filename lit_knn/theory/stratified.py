"""Draws without repetition from a discrete distribution: its largest probabilities are kept, the rest is sampled.

This is optimal resampling (Fearnhead & Clifford 2003): of all ways to represent a distribution by n weighted points
without bias, it has the least expected squared error of the weights.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class StratifiedDraws(NamedTuple):
    """n places for each row, of which the last may be unused.

    Attributes:
        ids: (B, n); where m is None distinct within the used places of a row, up to rounding.
        log_correction: (B, n), float64, log of base weight over proposal probability, up to a constant of each row. An
            image's weight is its exact likelihood times the exponential of this; −inf at unused places.
        sampled: (B, n), bool: drawn from the rest, not kept.
        used: (B,), number of used places.
        rest: (B, K), the proposal without what is kept, not normalised; K = N, or k + 1 with a flat tail in the last
            column.
    """

    ids: Tensor
    log_correction: Tensor
    sampled: Tensor
    used: Tensor
    rest: Tensor


def stratified_draws(
    log_q: Tensor, n: int, log_negligible: Tensor, m: int | None = None, generator: torch.Generator | None = None
) -> StratifiedDraws:
    """Represent each row's distribution by n weighted images.

    With m images kept the expected base weight of every image is its probability: kept ones have it as their weight,
    and n − m places are spread over the others in proportion to it, by systematic sampling, each with 1/(n − m) of
    their mass. Where fewer than n images hold all but a negligible part, only these are used, and nothing is sampled.

    Args:
        log_q: (B, N), float32, log-probabilities up to a constant of each row. Overwritten.
        n: places, n <= N.
        log_negligible: (B,), log of the part of the distribution that may be left out.
        m: images kept; None for the number that is sure to be drawn when n are drawn without repetition.
        generator: on the device of `log_q`.
    """
    log_top, top = log_q.topk(n, dim=1)
    maximum = log_top[:, :1]
    rest = log_q.sub_(maximum).exp_()
    log_top = (log_top - maximum).double()
    q_top = log_top.exp() / rest.sum(1, keepdim=True, dtype=torch.float64)
    used = num_used(log_top, rest.shape[1], log_negligible)
    if m is None:
        # With a place for every image all are kept: rounding must not make some of them random.
        sure = num_sure(q_top) if n < rest.shape[1] else torch.full_like(used, n)
    else:
        sure = torch.full_like(used, m)
    kept = torch.where(used < n, used, sure)
    is_kept = torch.arange(n, device=rest.device) < kept.unsqueeze(1)
    rest.scatter_(1, top, torch.where(is_kept, 0.0, log_top.exp().float()))
    return systematic_draws(top, kept, used, rest, rest, generator)[0]


def systematic_draws(
    top: Tensor, kept: Tensor, used: Tensor, rest: Tensor, image_q: Tensor, generator: torch.Generator | None = None
) -> tuple[StratifiedDraws, Tensor]:
    """Keep the first images and spread the other used places evenly over the rest, by one random number for each row.

    Args:
        top: (B, n), columns of `rest`, those that are kept first.
        kept: (B,), number of kept places.
        used: (B,), number of used places.
        rest: (B, K), mass of each column without what is kept, not normalised.
        image_q: (B, K), what a single image has of it: `rest` itself where each column is one image.
        generator: on the device of `rest`.

    Returns:
        The draws, with columns as ids, and their heights in the cumulative sum of `rest`, (B, n), float64.
    """
    place = torch.arange(top.shape[1], device=rest.device)
    is_kept, is_used = place < kept.unsqueeze(1), place < used.unsqueeze(1)
    cdf = rest.cumsum(1, dtype=torch.float64)
    mass, num_drawn = cdf[:, -1:].clone(), (used - kept).unsqueeze(1)
    u = torch.rand(len(rest), 1, dtype=torch.float64, device=rest.device, generator=generator)
    heights = (u + place - kept.unsqueeze(1)) / num_drawn.clamp(min=1) * mass
    drawn = torch.searchsorted(cdf, heights, right=True)
    # Unused and kept places have heights outside the distribution.
    drawn = drawn.clamp(max=rest.shape[1] - 1)
    # A rest that underflows has nothing to draw, and rounding of the cdf or a height can hit what has no probability.
    drawn_q = image_q.gather(1, drawn).double()
    sampled = is_used & ~is_kept & (drawn_q > 0)
    # Where nothing is drawn, 1 stands for the probability and for the mass: no 0 is divided by 0.
    each = torch.where(num_drawn > 0, mass, 1.0) / num_drawn.clamp(min=1)
    log_drawn = each.log() - torch.where(sampled, drawn_q, 1.0).log()
    log_correction = torch.where(sampled, log_drawn, torch.where(is_kept, 0.0, -math.inf))
    return StratifiedDraws(torch.where(is_kept, top, drawn), log_correction, sampled, used, rest), heights


def num_used(log_top: Tensor, N: int, log_negligible: Tensor) -> Tensor:
    """How many of the largest hold all but a negligible part; n where n do not."""
    # Mass behind each place: of the later ones, and at most N times the last one's for all that are not among the n.
    bound = log_top[:, -1:] + math.log(N)
    later = torch.cat([log_top[:, 1:], bound], dim=1).flip(1).logcumsumexp(1).flip(1)
    enough = later < log_negligible.unsqueeze(1)
    return torch.where(enough.any(1), enough.int().argmax(1) + 1, log_top.shape[1])


def num_sure(q_top: Tensor) -> Tensor:
    """How many of the largest a draw of n without repetition is sure to contain, at most n − 1.

    The i-th is sure if it has at least its share of the n − i + 1 places that are left for itself and all smaller ones.
    """
    n = q_top.shape[1]
    left = 1 - q_top.cumsum(1) + q_top
    sure = q_top * (n - torch.arange(n, device=q_top.device)) >= left
    return sure.long().cumprod(1).sum(1).clamp(max=n - 1)
