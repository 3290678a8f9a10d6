"""Draws without repetition from a discrete distribution: keep the largest probabilities and sample the rest.

This is optimal resampling (Fearnhead & Clifford 2003). Among all unbiased representations of a distribution by n
weighted points, it has the smallest expected squared error of the weights.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.theory.blocks import Cumulated, largest

# Smaller exponents count as −∞. float32 could not hold the results with all digits, and processors take up to 20 times
# longer for them.
LEAST_EXPONENT = -86.0
# exp(LEAST_EXPONENT) is below this value in any rounding.
LEAST_VALUE = math.exp(LEAST_EXPONENT) * (1 + 1e-5)


class StratifiedDraws(NamedTuple):
    """n drawn images per row. The last places of a row may be unused.

    Attributes:
        ids: (B, n). If m is None, the used places of a row hold distinct ids, up to rounding.
        log_correction: (B, n), float64, log(base weight / proposal probability) up to a constant per row; −inf at
            unused places. An image's weight is its exact likelihood times exp(log_correction).
        sampled: (B, n), bool, whether the image was drawn from the rest instead of kept.
        used: (B,), number of used places.
        rest: (B, K), the unnormalised proposal without the kept images. K = N, or k + 1 with a flat tail in the last
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

    The m most probable images are kept; their weights are their probabilities. Systematic sampling spreads the other
    n − m places over the rest in proportion to probability; each place weighs 1/(n − m) of the rest's mass. So the
    expected base weight of every image is its probability. If fewer than n images hold all but a negligible part of
    the mass, only these are used and nothing is sampled.

    Args:
        log_q: (B, N), float32, log-probabilities up to a constant per row. Overwritten.
        n: places, n <= N.
        log_negligible: (B,), log of the part of the distribution that may be left out.
        m: number of images to keep; None keeps those that n draws without repetition are sure to contain.
        generator: on the device of `log_q`.
    """
    log_top, top = largest(log_q, n)
    maximum = log_top[:, :1]
    rest = exp_relative(log_q, maximum)
    log_top = (log_top - maximum).double()
    p_top = log_top.exp()
    q_top = p_top / rest.sum(1, keepdim=True)
    used = num_used(log_top, rest.shape[1], log_negligible)
    if m is None:
        # If n = N, every image is kept. Rounding must not make some images random.
        sure = num_sure(q_top) if n < rest.shape[1] else torch.full_like(used, n)
    else:
        sure = torch.full_like(used, m)
    kept = torch.where(used < n, used, sure)
    is_kept = torch.arange(n, device=rest.device) < kept.unsqueeze(1)
    rest.scatter_(1, top, p_top.masked_fill_(is_kept, 0.0).float())
    return systematic_draws(top, kept, used, rest, rest, generator)[0]


def exp_relative(log_q: Tensor, maximum: Tensor) -> Tensor:
    """Compute exp(log_q − maximum) in place, (B, N). Results that float32 cannot hold with all digits are 0."""
    return torch.threshold_(log_q.sub_(maximum).clamp_(min=LEAST_EXPONENT).exp_(), LEAST_VALUE, 0.0)


def systematic_draws(
    top: Tensor, kept: Tensor, used: Tensor, rest: Tensor, image_q: Tensor, generator: torch.Generator | None = None
) -> tuple[StratifiedDraws, Tensor]:
    """Keep the first images and spread the other used places evenly over the rest, by one random number per row.

    Args:
        top: (B, n), columns of `rest`; the kept ones come first.
        kept: (B,), number of kept places.
        used: (B,), number of used places.
        rest: (B, K), unnormalised mass of each column without the kept images.
        image_q: (B, K), mass of a single image in each column; `rest` itself if each column is one image.
        generator: on the device of `rest`.

    Returns:
        The draws, whose ids are columns, and their heights in the cumulative sum of `rest`, (B, n), float64.
    """
    place = torch.arange(top.shape[1], device=rest.device)
    is_kept, is_used = place < kept.unsqueeze(1), place < used.unsqueeze(1)
    cdf = Cumulated(rest, top.shape[1])
    mass, num_drawn = cdf.total, (used - kept).clamp_(min=1).unsqueeze(1)
    u = torch.rand(len(rest), 1, dtype=torch.float64, device=rest.device, generator=generator)
    heights = (u + place).sub_(kept.unsqueeze(1)).div_(num_drawn).mul_(mass)
    # Unused and kept places have heights outside the distribution.
    drawn = cdf.columns(heights)
    # Reject columns of probability 0: rounding can hit them, and an underflowed rest has only such columns.
    drawn_q = image_q.gather(1, drawn).double()
    # Kept places are used.
    sampled = (is_used > is_kept) & (drawn_q > 0)
    # A row that draws nothing gets NaN or infinity here, and does not use it.
    log_drawn = (mass / num_drawn).log() - drawn_q.log_()
    log_correction = torch.where(sampled, log_drawn, -math.inf).masked_fill_(is_kept, 0.0)
    return StratifiedDraws(torch.where(is_kept, top, drawn), log_correction, sampled, used, rest), heights


def num_used(log_top: Tensor, N: int, log_negligible: Tensor | float) -> Tensor:
    """Count the largest probabilities that together hold all but a negligible part: (B,), n if all n hold less."""
    # Bound the mass after each place by the later places, plus N times the last place for all images outside the n.
    bound = log_top[:, -1:] + math.log(N)
    # The last place comes first here.
    later = torch.cat([log_top[:, 1:], bound], dim=1).flip(1).logcumsumexp(1)
    # Each further place leaves out less, so the places that leave out too much come first.
    limit = log_negligible.unsqueeze(1) if isinstance(log_negligible, Tensor) else log_negligible
    return (later[:, 1:] >= limit).sum(1).add_(1)


def num_sure(q_top: Tensor) -> Tensor:
    """Count the largest probabilities that n draws without repetition are sure to contain, (B,), at most n − 1.

    n − i + 1 places are left for the i-th and all smaller ones. The i-th is sure if its share of them is at least 1.
    """
    n = q_top.shape[1]
    left = 1 - q_top.cumsum(1) + q_top
    sure = q_top * torch.arange(n, 0, -1, device=q_top.device) >= left
    return sure[:, :-1].cumprod(1).sum(1)
