"""Draws without repetition from a discrete distribution: keep the largest probabilities and sample the rest.

This is optimal resampling (Fearnhead & Clifford 2003). Among all unbiased representations of a distribution by n
weighted points, it has the smallest expected squared error of the weights.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

# Smaller exponents count as −∞, because float32 cannot hold their exp with all digits, and processors are up to 20
# times slower with such numbers. LEAST_VALUE is above exp(LEAST_EXPONENT) in any rounding, so that the latter counts as
# 0.
LEAST_EXPONENT = -86.0
LEAST_VALUE = math.exp(LEAST_EXPONENT) * (1 + 1e-5)
# Minimum block size of a cumulative sum. Smaller blocks do not save time.
LEAST_BLOCK = 4


class StratifiedDraws(NamedTuple):
    """n drawn images per row. The last places of a row may be unused.

    Attributes:
        ids: (B, n). The used places of a row hold distinct ids, up to rounding.
        log_correction: (B, n), float64, logarithm of the image's weight among the draws, divided by its probability; up
            to a constant per row, and −inf at unused places. In importance sampling an image has the weight
            exact likelihood · exp(log_correction).
        sampled: (B, n), bool, whether the image was drawn from the rest. Otherwise it was kept.
        rest: (B, N), the unnormalised proposal without the kept images.
    """

    ids: Tensor
    log_correction: Tensor
    sampled: Tensor
    rest: Tensor


def stratified_draws(
    log_q: Tensor, n: int, log_negligible: Tensor, generator: Generator | None = None
) -> StratifiedDraws:
    """Represent each row's distribution by at most n weighted images.

    The most probable images are kept: those that n draws without repetition always contain. Their weights are their
    probabilities. Systematic sampling fills the other s places from the rest, in proportion to probability. Each of
    these places has the weight 1/s of the rest's mass. So the expected weight of every image is its probability. If
    fewer than n images hold all but a negligible part of the mass, only these are used.

    Args:
        log_q: (B, N), float32, log-probabilities up to a constant per row. Overwritten.
        n: places, n <= N.
        log_negligible: (B,), log of the part of the distribution that may be left out.
        generator: on the device of `log_q`.
    """
    log_top, top = log_q.topk(n, dim=1)
    maximum = log_top[:, :1]
    # Results that float32 cannot hold with all digits become 0.
    rest = torch.threshold_(log_q.sub_(maximum).clamp_(min=LEAST_EXPONENT).exp_(), LEAST_VALUE, 0.0)
    log_top = (log_top - maximum).double()
    p_top = log_top.exp()
    used = num_used(log_top, rest.shape[1], log_negligible)
    # If n = N, every image is kept. Rounding must not make the choice of some images random.
    sure = torch.full_like(used, n)
    if n < rest.shape[1]:
        sure = num_sure(p_top / rest.sum(1, keepdim=True))
    num_kept = torch.where(used < n, used, sure)

    place = torch.arange(n, device=rest.device)
    is_kept, is_used = place < num_kept.unsqueeze(1), place < used.unsqueeze(1)
    rest.scatter_(1, top, p_top.masked_fill_(is_kept, 0.0).float())
    cdf = Cumulated(rest, n)
    num_drawn = (used - num_kept).clamp_(min=1).unsqueeze(1)
    u = torch.rand(len(rest), 1, dtype=torch.float64, device=rest.device, generator=generator)
    # Systematic sampling: one random number u places equally spaced heights in the cumulative distribution, the j-th of
    # the drawn places at (u + j)/s of the total. Kept and unused places get heights outside, which do not matter.
    share = (u + place).sub_(num_kept.unsqueeze(1)).div_(num_drawn)
    drawn = cdf.columns(share.mul_(cdf.total))
    drawn_q = rest.gather(1, drawn).double()
    # Reject columns of probability 0. Rounding can select them, and a rest that has vanished in float32 has only such
    # columns.
    sampled = is_used & ~is_kept & (drawn_q > 0)
    # A row that draws nothing gets NaN or infinity here, but does not use this value.
    log_drawn = (cdf.total / num_drawn).log() - drawn_q.log_()
    log_correction = torch.where(sampled, log_drawn, -math.inf).masked_fill_(is_kept, 0.0)
    return StratifiedDraws(torch.where(is_kept, top, drawn), log_correction, sampled, rest)


def num_used(log_top: Tensor, N: int, log_negligible: Tensor) -> Tensor:
    """Count how many of the largest probabilities hold all but a negligible part of the mass: (B,).

    The count is n if all n hold less.

    Args:
        log_top: (B, n), descending, log-probabilities up to a constant per row.
        N: number of all images.
        log_negligible: (B,), log of the part that may be left out.
    """
    # The images outside the n have together at most N times the n-th probability.
    bound = log_top[:, -1:] + math.log(N)
    # Bounds of the mass that the first n, n − 1, …, 1 places leave out: sums from the end.
    left_out = torch.cat([log_top[:, 1:], bound], dim=1).flip(1).logcumsumexp(1)
    # The count is one more than the number of counts below n that leave out too much.
    return (left_out[:, 1:] >= log_negligible.unsqueeze(1)).sum(1).add_(1)


def num_sure(q_top: Tensor) -> Tensor:
    """Count the largest probabilities that n draws without repetition always contain: (B,), at most n − 1.

    After the i − 1 largest images have taken a place each, n − i + 1 places are left for the i-th and all smaller ones.
    They are shared in proportion to the probabilities. An image whose part would be one place or more is sure to be
    drawn, if all larger ones are. The last of n places is always drawn at random.

    Args:
        q_top: (B, n), the n largest probabilities of each row, in descending order; those of all images sum to 1.
    """
    n = q_top.shape[1]
    left = 1 - q_top.cumsum(1) + q_top
    places_left = torch.arange(n, 0, -1, device=q_top.device)
    sure = q_top * places_left >= left
    # The product is 1 until the first image that is not sure.
    return sure[:, :-1].cumprod(1).sum(1)


class Cumulated:
    """The cumulative sums of rows of values (B, N), at least 0, stored only after each block of neighbouring columns.

    To find n heights among N columns, one reads about √(N·n) block sums, and then the columns of n blocks. `total`
    (B, 1), float64, is the sum of each row.
    """

    def __init__(self, values: Tensor, n: int) -> None:
        self.values, N = values, values.shape[1]
        self.size = max(math.isqrt(N // n), 1)
        self.sums = values
        if self.size < LEAST_BLOCK:
            # In short rows, blocks cost more time than they save.
            self.size = 1
        else:
            whole = N // self.size * self.size
            sums, left = values[:, :whole].unflatten(1, (-1, self.size)).sum(2), values[:, whole:]
            self.sums = torch.cat([sums, left.sum(1, keepdim=True)], 1)
        self.cdf = self.sums.cumsum(1, dtype=torch.float64)
        self.total = self.cdf[:, -1:]

    def columns(self, heights: Tensor) -> Tensor:
        """Find the first column whose cumulative sum exceeds each of `heights` (B, n), float64: (B, n)."""
        N = self.values.shape[1]
        block = torch.searchsorted(self.cdf, heights, right=True).clamp_(max=self.sums.shape[1] - 1)
        if self.size == 1:
            return block
        mass = self.sums.gather(1, block).double()
        # The sum of a block is rounded to the type of the values. So the height within the block is compared as a share
        # of the block's mass, by which this rounding cancels.
        share = (heights - self.cdf.gather(1, block) + mass) / mass
        columns = block.unsqueeze(2) * self.size + torch.arange(self.size, device=block.device)
        # The last block may end beyond the last column.
        inside = self.values.gather(1, columns.clamp(max=N - 1).flatten(1)).view_as(columns)
        inside = inside * (columns < N)
        cdf = inside.cumsum(2, dtype=torch.float64)
        # The number of columns of the block whose cumulative sum does not exceed the height.
        passed = (cdf <= share.unsqueeze(2) * cdf[..., -1:]).sum(2)
        return (block * self.size + passed.clamp_(max=self.size - 1)).clamp_(max=N - 1)
