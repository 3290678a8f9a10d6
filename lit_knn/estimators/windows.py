"""Sums over the windows of an image, for the patches of `PatchPosterior`."""

from torch import Tensor


def sliding_sums(x: Tensor, size: int) -> Tensor:
    """Sum over windows along the first axis: (n, *) to (n − size + 1, *), row i is the sum of x[i : i + size].

    A window is made of blocks of 1, 2, 4, … rows, by the binary digits of `size`: one of 5 rows is a block of 1 and one
    of 4. This takes about 2·log₂(size) additions for each row. Nothing is subtracted, so no digits cancel, and the
    rounding grows only with log₂(size).
    """
    count = len(x) - size + 1
    total, start = None, 0
    # Row i of `blocks` is the sum of the `span` rows of x from row i on.
    blocks, span = x, 1
    while True:
        size_has_this_digit = size // span % 2 == 1
        if size_has_this_digit:
            part = blocks[start : start + count]
            total = part if total is None else total + part
            start += span
        if 2 * span > size:
            assert total is not None
            return total
        blocks = blocks[:-span] + blocks[span:]
        span *= 2


def over_pixels(weights: Tensor, size: int) -> Tensor:
    """Sum the weights of R windows, (R, *), over the windows that hold each pixel of an axis: (R + size − 1, *)."""
    # Pixel i lies in the windows i − size + 1 to i. Windows outside the image have weight 0.
    padded = weights.new_zeros(len(weights) + 2 * (size - 1), *weights.shape[1:])
    padded[size - 1 : size - 1 + len(weights)] = weights
    return sliding_sums(padded, size)
