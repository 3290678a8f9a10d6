"""Number types of the products in searches and proposals, and float32 products in full precision."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lit_knn.common.errors import InputError

TYPES = ("auto", "float32", "bfloat16")

_lock = threading.Lock()
# One entry for each block of `full_float32` that runs now, in any thread. All entries are the same function, which
# restores the setting of the process.
_inside: list[Callable[[], object]] = []


def check_compute(owner: str, compute: str) -> str:
    """Return `compute` if it is one of `TYPES`; if not, raise an InputError that names the class `owner`."""
    if compute not in TYPES:
        raise InputError(f"{owner}: compute={compute!r} must be one of {', '.join(TYPES)}")
    return compute


def compute_dtype(owner: str, compute: str, device: torch.device) -> torch.dtype:
    """Return the type that the option `compute` means: `auto` is bfloat16 on a GPU that multiplies it, else float32.

    A CPU rounds the sums of bfloat16 products to 8 bits, so near images such as frames of a video change places.

    Args:
        owner: name of the class that has the option.
        compute: one of `TYPES`.
        device: the device that multiplies.

    Raises:
        InputError: the device does not multiply the type natively.
    """
    if compute == "auto":
        if device.type == "cuda" and is_native(torch.bfloat16, device):
            return torch.bfloat16
        return torch.float32

    dtype: torch.dtype = getattr(torch, compute)
    if not is_native(dtype, device):
        raise InputError(
            f"{owner}: compute={compute}: this {device.type} does not multiply it natively; use float32"
        )
    return dtype


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device has instructions that multiply float32 or bfloat16.

    A machine without a GPU may plan a run for another machine. Its GPU then counts as one that multiplies both.
    """
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        # Compute capability 8 (Ampere) is the first that multiplies bfloat16.
        return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 8
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 for matrices of one type. On CUDA the result is never rounded to their type."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return (a @ b).float()
    return torch.mm(a, b, out_dtype=torch.float32)


def add_product(total: Tensor, rows: Tensor, matrix: Tensor) -> None:
    """Add rows @ matrix to `total`. All three are float32; the matrix may also be bfloat16."""
    if matrix.dtype == torch.float32:
        total.addmm_(rows, matrix)
        return

    # A float32 has 24 significand bits and a bfloat16 has 8, so each value is the sum of three bfloat16 numbers.
    for _ in range(3):
        digit = rows.bfloat16()
        total += matmul_float32(digit, matrix)
        rows = rows - digit


def encode(
    chunks: Iterable[Tensor], N: int, code: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Apply `code` to all vectors x, piece by piece.

    Args:
        chunks: all vectors in order, in pieces (c, *shape).
        N: their number.
        code: returns the codes, (c, m), of a piece.

    Returns:
        The codes, (N, m), and ‖code(x)‖²/2, (N,) float32.
    """
    values = half_sq_norms = torch.empty(0)
    start = 0
    for x in chunks:
        y = code(x)
        if start == 0:
            values = y.new_empty(N, y.shape[1])
            half_sq_norms = x.new_empty(N)

        rows = slice(start, start + len(y))
        values[rows] = y
        half_sq_norms[rows] = y.float().square().sum(1) / 2
        start += len(y)
    return values, half_sq_norms


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products in full precision and without autocast inside the block. It is also a decorator.

    `torch.set_float32_matmul_precision("high")`, which Lightning advises on GPUs, rounds the factors of float32
    products to TF32, and "medium" may round them to bfloat16, on CPUs too. Scores of images need all digits of float32.
    The setting belongs to the process, so the last thread that leaves the block restores it.
    """
    with _lock:
        _inside.append(_inside[0] if _inside else _set_highest())
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        with _lock:
            restore = _inside.pop()
            if not _inside:
                restore()


def _set_highest() -> Callable[[], object]:
    """Choose full precision for float32 products. Returns a function that restores the setting before."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # PyTorch refuses this call once the process has set `fp32_precision` of a single backend. That option calls
        # full precision "ieee".
        return _set_backends("ieee", "ieee")
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _set_backends(*values: str) -> Callable[[], object]:
    """Set `fp32_precision` of products on CUDA and on the CPU. Returns a function that restores the values before."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    for backend, value in zip(backends, values, strict=True):
        backend.fp32_precision = value
    return lambda: _set_backends(*before)


def whole_tiles(rows: int) -> int:
    """Round a number of rows down to a multiple of 64, because a GPU's fast kernels work on tiles of 64 rows.

    A number below 64 stays, but is at least 1.
    """
    if rows >= 64:
        return rows // 64 * 64
    return max(rows, 1)
