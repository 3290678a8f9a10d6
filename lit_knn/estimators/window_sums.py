"""Log weights of windows as sums over the rows of pixels that windows share."""

import torch
from torch import Tensor


def scaled_latents(z: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return latents (H, W, C, B) as (H, W, C + 1, B): z/t² and a channel 1/t².

    The product with `with_half_squares` of x is (z·x − x²/2)/t² in each pixel. Its sum over a window is the window's
    log weight −‖z_w − x_w‖²/2t², except for ‖z_w‖², which is the same for all x.
    """
    return (torch.cat([z, torch.ones_like(z[:, :, :1])], 2).double() / t.square()).to(dtype)


def with_half_squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images (H, W, C, n) as (H, W, C + 1, n), with a channel −‖pixel‖²/2."""
    own = x.new_empty(*x.shape[:2], x.shape[2] + 1, x.shape[3], dtype=dtype)
    own[:, :, :-1] = x
    torch.sum(own[:, :, :-1].square(), 2, out=own[:, :, -1]).mul_(-0.5)
    return own


def sliding_sums(x: Tensor, size: int) -> Tensor:
    """Sum over windows along the first axis: (n, *) to (n − size + 1, *), row i is the sum of x[i : i + size].

    Sums of 1, 2, 4 ... rows are added: about 2·log₂(size) additions for each row. Nothing is subtracted, so no digits
    cancel, and the rounding grows with log₂(size) alone.
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
