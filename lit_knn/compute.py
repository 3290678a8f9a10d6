"""Number types for the products that only find or propose images."""

import torch

from lit_knn.errors import InputError

COMPUTE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_compute(owner: str, compute: str) -> str:
    """Return `compute` if it is `auto` or a known type.

    Raises:
        InputError: it is not.
    """
    if compute != "auto" and compute not in COMPUTE_TYPES:
        raise InputError(f"{owner}: compute={compute!r} must be one of auto, {', '.join(COMPUTE_TYPES)}")
    return compute


def compute_dtype(owner: str, compute: str, device: torch.device) -> torch.dtype:
    """The type that a checked option `compute` means on a device.

    Args:
        owner: for the error message.
        compute: `float32`, `bfloat16`, `float16`, or `auto`: bfloat16 where the device multiplies it natively.
        device: where the products run.

    Raises:
        InputError: the device does not multiply the type natively.
    """
    if compute == "auto":
        return torch.bfloat16 if _is_native(torch.bfloat16, device) else torch.float32
    dtype = COMPUTE_TYPES[compute]
    if not _is_native(dtype, device):
        raise InputError(f"{owner}: compute={compute}: this {device.type} does not multiply it natively; use float32")
    return dtype


def _is_native(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        return major >= (8 if dtype == torch.bfloat16 else 7)
    if device.type == "cpu" and dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False
