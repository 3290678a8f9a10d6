"""Searches in long rows that neither sort nor cumulate all values.

To find n of N values, they first look at about √(N·n) blocks, and then at the values in n chosen blocks.
"""

import math

import torch
from torch import Tensor

# Smaller blocks do not pay.
LEAST_BLOCK = 4


def largest(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Find the n largest values of each row (B, N), in decreasing order, and their columns: (B, n) each."""
    N = values.shape[1]
    size = _block_size(N, n)
    if size == 1:
        return values.topk(n, dim=1)
    # Column j belongs to block j mod `num_blocks`, because processors compare whole blocks faster than their columns.
    num_blocks = N // size
    blocks = values[:, : size * num_blocks].unflatten(1, (size, num_blocks)).amax(1)
    # The n largest values are in the n blocks with the largest maxima, or in the columns left over.
    first = blocks.topk(n, dim=1, sorted=False).indices.unsqueeze(2)
    columns = (first + num_blocks * torch.arange(size, device=values.device)).flatten(1)
    left = torch.arange(size * num_blocks, N, device=values.device).expand(len(values), -1)
    columns = torch.cat([columns, left], 1)
    found, place = values.gather(1, columns).topk(n, dim=1)
    return found, columns.gather(1, place)


class Cumulated:
    """The cumulative sum of rows of values, known after each block of neighbouring columns.

    Args:
        values: (B, N), at least 0.
        n: number of heights that will be searched in each row, for the size of the blocks.
    """

    def __init__(self, values: Tensor, n: int) -> None:
        self.values, N = values, values.shape[1]
        self.size = _block_size(N, n)
        self.sums = values
        if self.size > 1:
            whole = N // self.size * self.size
            sums, left = values[:, :whole].unflatten(1, (-1, self.size)).sum(2), values[:, whole:]
            self.sums = torch.cat([sums, left.sum(1, keepdim=True)], 1)
        self.cdf = self.sums.cumsum(1, dtype=torch.float64)

    @property
    def total(self) -> Tensor:
        """The sum of each row, (B, 1), float64."""
        return self.cdf[:, -1:]

    def columns(self, heights: Tensor) -> Tensor:
        """Find the first columns at which the sum exceeds `heights` (B, n), float64: (B, n)."""
        N = self.values.shape[1]
        block = torch.searchsorted(self.cdf, heights, right=True).clamp_(max=self.sums.shape[1] - 1)
        if self.size == 1:
            return block
        mass = self.sums.gather(1, block).double()
        # Blocks are summed in the type of the values. A share of a block is safe from the rounding of its sum.
        share = (heights - self.cdf.gather(1, block) + mass) / mass
        columns = block.unsqueeze(2) * self.size + torch.arange(self.size, device=block.device)
        inside = self.values.gather(1, columns.clamp(max=N - 1).flatten(1)).view_as(columns) * (columns < N)
        cdf = inside.cumsum(2, dtype=torch.float64)
        passed = (cdf <= share.unsqueeze(2) * cdf[..., -1:]).sum(2)
        return (block * self.size + passed.clamp_(max=self.size - 1)).clamp_(max=N - 1)


def _block_size(N: int, n: int) -> int:
    """Return the number of columns of a block for which blocks and searched columns are fewest. N // size >= n.

    For short rows it is 1, because their blocks would not be worth the additional operations.
    """
    size = math.isqrt(N // n)
    return size if size >= LEAST_BLOCK else 1
