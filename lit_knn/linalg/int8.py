"""Vectors as 8-bit integers, which modern processors multiply fastest, and exact products with them."""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Pixel p is p/127.5 − 1 in model space. In units of 1/127.5 this is (p − 128) + 1/2.
PIXEL_SCALE, PIXEL_OFFSET = 1 / 127.5, 0.5
# Each digit of a query is an integer from −127 to 127, and the unit of the next digit is 254 times smaller.
DIGIT = 127
BASE = 254
# A sum of this many products digit · code always fits in int32: 127 · 128 · 2^17 < 2^31.
TERMS = 2**17
# To compute norms, this many vectors are read at a time, and this many bytes are converted to float32 at a time.
HALF_SQ_NORM_ROWS = 8192
HALF_SQ_NORM_BYTES = 16 * 2**20


class Codes(NamedTuple):
    """N vectors x = scale·(code + offset).

    Attributes:
        values: (N, d), int8.
        scale: model-space size of one code unit.
        offset: added to each code.
    """

    values: Tensor
    scale: float
    offset: float


def half_sq_norms(pieces: Iterable[Tensor]) -> Tensor:
    """Compute ‖code‖²/2 of N vectors, (N,) float32, from pieces (c, d) of any type."""
    norms, work = [], torch.empty(0)
    for piece in pieces:
        step = max(HALF_SQ_NORM_BYTES // (4 * piece.shape[1]), 1)
        for rows in piece.split(step):
            # All pieces share one work array. With an array per piece, the small results in between would fragment
            # the heap, and the heap would grow to the size of a float32 copy of all vectors.
            if work.numel() == 0:
                work = torch.empty(step, piece.shape[1], device=piece.device)
            norms.append(work[: len(rows)].copy_(rows).square_().sum(1) / 2)
    return torch.cat(norms)


def quantise(chunks: Callable[[], Iterable[Tensor]], N: int) -> Codes:
    """Turn vectors into codes, without loss if all are pixels in model space.

    Args:
        chunks: yields all N vectors in order, (c, d) float32 each; called up to three times.
        N: number of vectors.
    """
    values = None
    for start, chunk in _numbered(chunks()):
        codes = chunk / PIXEL_SCALE - PIXEL_OFFSET
        rounded = codes.round()
        if (codes - rounded).abs().max() > 1e-3 or rounded.min() < -128 or rounded.max() > 127:
            break
        values = _empty(N, chunk) if values is None else values
        values[start : start + len(chunk)] = rounded.to(torch.int8)
    else:
        assert values is not None
        return Codes(values, PIXEL_SCALE, PIXEL_OFFSET)
    scale = max(float(chunk.abs().max()) for chunk in chunks()) / DIGIT or 1.0
    values = _empty(N, chunk)
    for start, chunk in _numbered(chunks()):
        values[start : start + len(chunk)] = (chunk / scale).round().to(torch.int8)
    return Codes(values, scale, 0.0)


def pixel_codes(pixels: Tensor) -> Tensor:
    """Return pixels p, uint8, as p − 128, int8."""
    return (pixels ^ 128).view(torch.int8)


def digits_of(rows: Tensor, count: int, largest: float | None = None) -> tuple[Tensor, Tensor]:
    """Split each row into integers: row = unit·Σ_j digit_j / 254^j, with error at most unit/2/254^(count − 1).

    Args:
        rows: (B, d), float32.
        count: number of digits.
        largest: largest absolute value that the rows may have; None for the largest of each row.

    Returns:
        `digits` (count, B, d), int8, and `unit` (B, 1), float32.
    """
    most = rows.abs().amax(1, keepdim=True) if largest is None else rows.new_full((len(rows), 1), largest)
    unit = most.clamp(min=torch.finfo(torch.float32).tiny) / DIGIT
    left = rows / unit
    digits = torch.empty(count, *rows.shape, dtype=torch.int8, device=rows.device)
    for digit in digits:
        whole = left.round()
        digit.copy_(whole)
        left = (left - whole) * BASE
    return digits, unit


def product(digits: Tensor, matrix: Tensor) -> Tensor:
    """Return Σ_j digit_j @ matrix / 254^j, (B, N), float32. Each digit's product is exact before this rounding.

    Args:
        digits: (count, B, d), int8.
        matrix: (d, N), int8.
    """
    blocks = zip(digits.split(TERMS, dim=2), matrix.split(TERMS), strict=True)
    return reduce(Tensor.add_, (_product_of_few(*block) for block in blocks))


def _product_of_few(digits: Tensor, matrix: Tensor) -> Tensor:
    """Compute `product` for d <= TERMS."""
    count, batch, _ = digits.shape
    parts = _int32_product(digits.flatten(0, 1), matrix).reshape(count, batch, matrix.shape[1])
    total = parts[-1].float()
    for part in reversed(parts[:-1]):
        total = total.div_(BASE).add_(part)
    return total


def _int32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, int32, for int8 matrices of any shape. Zeros extend them to a shape that PyTorch multiplies."""
    (rows, terms), columns = a.shape, b.shape[1]
    if a.is_cuda:
        # CUDA needs more than 16 rows, and other sizes in multiples of 8. On many GPUs, such as A100, cuBLAS also needs
        # the terms of each sum to lie together (PyTorch issue 169956).
        more_rows, more_terms, more_columns = max(17 - rows, 0), -terms % 8, -columns % 8
        a, b = a.contiguous(), b.T.contiguous().T
    else:
        # PyTorch 2.14 gives wrong products of one term on a CPU.
        more_rows, more_terms, more_columns = 0, int(terms == 1), 0
    if more_rows or more_terms:
        a = pad(a, (0, more_terms, 0, more_rows))
    if more_terms or more_columns:
        b = pad(b.T, (0, more_terms, 0, more_columns)).T
    return torch._int_mm(a, b)[:rows, :columns]


def _empty(N: int, like: Tensor) -> Tensor:
    return torch.empty(N, like.shape[1], dtype=torch.int8, device=like.device)


def _numbered(chunks: Iterable[Tensor]) -> Iterable[tuple[int, Tensor]]:
    start = 0
    for chunk in chunks:
        yield start, chunk
        start += len(chunk)
