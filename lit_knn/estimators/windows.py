"""Sums over the windows of an image, for the patches of `PatchPosterior`."""

from torch import Tensor


def sliding_sums(x: Tensor, size: int) -> Tensor:
    """Sum over windows along the first axis: (n, *) to (n − size + 1, *), row i is the sum of x[i : i + size].

    Sums of 1, 2, 4 ... rows are added: about 2·log₂(size) additions for each row. Nothing is subtracted, so no digits
    cancel, and the rounding grows only with log₂(size).
    """
    count = len(x) - size + 1
    total, start, span = None, 0, 1
    while True:
        if size & span:
            part = x[start : start + count]
            total = part if total is None else total + part
            start += span
        if 2 * span > size:
            assert total is not None
            return total
        x = x[:-span] + x[span:]
        span *= 2


def over_pixels(weights: Tensor, size: int) -> Tensor:
    """Sum weights of windows (R, *) over the windows that hold each pixel of an axis: (R + size − 1, *)."""
    padded = weights.new_zeros(len(weights) + 2 * (size - 1), *weights.shape[1:])
    padded[size - 1 : size - 1 + len(weights)] = weights
    return sliding_sums(padded, size)
