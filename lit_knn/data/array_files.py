"""Images, latents or vectors in NumPy files: `.npy` and `.npz`."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lit_knn.common.errors import InputError, printable
from lit_knn.data.files import existing, reading

KIND = " as NumPy arrays"


def read_array_file(path: str | os.PathLike[str], floats_as_is: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
    """Read images, latents or vectors from one NumPy file.

    uint8 arrays are images of 1 or 3 channels, (N, C, H, W). An array (N, H, W, C) is moved to this layout if its last
    axis is 1 or 3 long and axis 1 is not. Floats (N, *shape) become float32, and are never rescaled or rearranged.

    An .npz file has the array under `images`, `arr_0` or, for a single array, any name, and optionally `labels`, (N,)
    integers. `floats_as_is` also accepts floats that look like images by mistake, see `Arrays`. The result is the array
    (N, *shape), uint8 or float32, and `labels` (N,), int64, or None.
    """
    path = existing(path)
    with reading(path, KIND):
        array, labels = _load_arrays(path)
    if array.ndim < 2 or 0 in array.shape:
        raise InputError(f"{path}: the array must be (N, *shape) and not empty, got shape {array.shape}")
    if array.dtype == np.uint8:
        array = np.ascontiguousarray(np.moveaxis(array, 3, 1) if _channels_last(array.shape) else array)
        if array.ndim != 4 or array.shape[1] not in (1, 3):
            raise InputError(f"{path}: uint8 images must be (N, C, H, W) with 1 or 3 channels, got shape {array.shape}")
    elif np.issubdtype(array.dtype, np.floating):
        array = _checked_floats(path, array, floats_as_is)
    else:
        raise InputError(f"{path}: the array must be uint8 or float, got {array.dtype}")
    return array, None if labels is None else _checked_labels(path, labels, len(array))


def array_file_shape(path: str | os.PathLike[str]) -> tuple[tuple[int, ...], int]:
    """Return the shape that `read_array_file` gives for an .npy file, and the bytes of each value, without reading."""
    path = existing(path)
    with reading(path, KIND):
        array = np.load(path, mmap_mode="r")
        shape = len(array), *array.shape[1:]
    if array.dtype != np.uint8:
        return shape, 4
    return (shape[0], shape[3], *shape[1:3]) if _channels_last(shape) else shape, 1


def _load_arrays(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    if path.suffix.lower() not in (".npy", ".npz"):
        raise InputError(f"{path} is neither an .npy nor an .npz file")
    loaded = np.load(path)
    if isinstance(loaded, np.ndarray):
        return loaded, None
    with loaded:
        return loaded[_array_key(path, loaded.files)], loaded["labels"] if "labels" in loaded.files else None


def _array_key(path: Path, keys: Iterable[str]) -> str:
    others = [key for key in keys if key != "labels"]
    chosen = [key for key in ("images", "arr_0") if key in others][:1] or others
    if len(chosen) != 1:
        found = ", ".join(map(printable, keys)) or "nothing"
        raise InputError(f"{path} must hold the array under the key images, arr_0 or as the only array, found: {found}")
    return chosen[0]


def _channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3)


def _checked_floats(path: Path, array: np.ndarray, as_is: bool) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, np.float32)
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        row = next(i for i, item in enumerate(array) if not np.isfinite(item).all())
        raise InputError(f"{path}: the array holds a value that is not a finite float32 (first in item {row})")
    if not as_is and _channels_last(array.shape):
        told = f"{path}: float array of shape {array.shape} looks like images with the channels last"
        raise InputError(f"{told}; floats are never rearranged: give (N, C, H, W), or set floats_as_is if it is meant")
    if not as_is and array.ndim == 4 and array.shape[1] in (1, 3) and (low < -1 or low >= 0 or high > 1):
        told = f"{path}: float images with values from {low:g} to {high:g}; floats are never rescaled"
        raise InputError(f"{told}: give uint8, or floats in [-1, 1], or set floats_as_is if these values are meant")
    return array


def _checked_labels(path: Path, labels: np.ndarray, N: int) -> np.ndarray:
    if labels.shape != (N,) or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(f"{path}: labels must be {N} integers, got {labels.dtype} of shape {labels.shape}")
    if labels.min() < 0 or labels.max() >= 2**31:
        bad = labels[(labels < 0) | (labels >= 2**31)][0]
        raise InputError(f"{path}: labels must be from 0 to {2**31 - 1}, got {bad}")
    return labels.astype(np.int64)
