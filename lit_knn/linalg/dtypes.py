"""Tells which devices multiply 8-bit integers, for the products of `Exact`."""

import torch

from lit_knn.linalg import precision


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Like `precision.is_native`; int8 is native on CPUs with VNNI."""
    if dtype == torch.int8:
        return device.type == "cpu" and torch.cpu._is_vnni_supported()
    return precision.is_native(dtype, device)
