"""NumPy arrays as tensors: mapped files, and floats of 16 bits, also bfloat16, for which NumPy has no type."""

import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # torch takes seconds to load.
    from torch import Tensor


def is_half(dtype: np.dtype) -> bool:
    """Return whether values are float16 or bfloat16.

    `np.save` writes the bfloat16 arrays of JAX and ml_dtypes as values of 2 bytes without a type, V2. No other program
    writes such values, so they count as bfloat16.
    """
    return dtype.itemsize == 2 and dtype.kind in "fV" and dtype.names is None


def type_name(dtype: np.dtype) -> str:
    """Return the name of a type for a message."""
    return "bfloat16" if is_half(dtype) and dtype.kind == "V" else str(dtype)


def half_tensor(array: np.ndarray) -> "Tensor":
    """Return values that are `is_half` as a tensor of float16 or bfloat16.

    A mapped array stays on the disk, unless its rows or bytes are in another order than PyTorch's.
    """
    import torch

    if array.dtype.kind == "V":
        return as_tensor(array.view(np.int16)).view(torch.bfloat16)
    return as_tensor(array.astype(np.float16, copy=False))


def as_tensor(array: np.ndarray) -> "Tensor":
    """Return an array as a tensor, without a copy if its rows are in order; nothing may write to it."""
    import torch

    with warnings.catch_warnings():
        # Files are mapped read-only, because a writable mapping would reserve as much memory as the size of the file.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array))
