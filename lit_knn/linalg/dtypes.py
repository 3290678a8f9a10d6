"""Number types for products that only find or propose images."""

import torch
from torch import Tensor

from lit_knn.errors import InputError

COMPUTE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_compute(owner: str, compute: str, *more: str) -> str:
    """Return `compute`, or raise InputError unless it is `auto`, a type with float32's range, or one of `more`."""
    known = ("auto", "float32", "bfloat16", *more)
    if compute not in known:
        raise InputError(f"{owner}: compute={compute!r} must be one of {', '.join(known)}")
    return compute


def compute_dtype(owner: str, compute: str, device: torch.device, int8: bool = False) -> torch.dtype:
    """Find the type that a checked option `compute` means on a device.

    Args:
        owner: class name for the error message.
        compute: a type, or `auto` for the fastest type that the device multiplies natively.
        device: where the products run.
        int8: whether `auto` may be int8.

    Raises:
        InputError: the device does not multiply the type natively.
    """
    if compute == "auto":
        fastest = (torch.int8, torch.bfloat16, torch.float32) if int8 else (torch.bfloat16, torch.float32)
        return next(dtype for dtype in fastest if is_native(dtype, device))
    dtype = torch.int8 if compute == "int8" else COMPUTE_TYPES[compute]
    if not is_native(dtype, device):
        raise InputError(f"{owner}: compute={compute}: this {device.type} does not multiply it natively; use float32")
    return dtype


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 for matrices of one type. On CUDA the result is never rounded to that type."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return (a @ b).float()
    return torch.mm(a, b, out_dtype=torch.float32)


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether the device has instructions that multiply the type."""
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        if dtype == torch.int8:
            return False  # PyTorch's integer product needs shapes that searches do not have
        major, _ = torch.cuda.get_device_capability(device)
        return major >= (8 if dtype == torch.bfloat16 else 7)
    if device.type == "cpu" and dtype == torch.int8:
        return torch.cpu._is_vnni_supported()
    if device.type == "cpu" and dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def planned_dtype(owner: str, compute: str, device: torch.device) -> torch.dtype:
    """Like `compute_dtype`, but for plans: if this machine has no GPU, a CUDA device counts as a current GPU."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.bfloat16 if compute == "auto" else getattr(torch, compute)
    return compute_dtype(owner, compute, device)
