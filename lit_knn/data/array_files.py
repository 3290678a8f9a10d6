"""Images, latents or vectors in NumPy files: `.npy` and `.npz`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_knn.common.errors import InputError, printable, reading
from lit_knn.data.array_keys import LABEL_KEYS, Loaded, check_suffix, load_arrays
from lit_knn.data.array_tensors import half_tensor, is_half, type_name
from lit_knn.data.files import existing, say
from lit_knn.data.labels import class_numbers

if TYPE_CHECKING:  # Reading an array needs no torch, unless it has floats of 16 bits.
    from torch import Tensor

# Part of the message that a file cannot be read.
KIND = " as NumPy arrays"


def read_array_file(
    path: str | os.PathLike[str], floats_as_is: bool = False, labels_used: bool = False
) -> tuple["np.ndarray | Tensor", np.ndarray | None]:
    """Read images, latents or vectors from one NumPy file, and print a line that says what was read.

    uint8 arrays are images of 1 or 3 channels, (N, C, H, W). An array (N, H, W, C) is moved to this
    layout if its last axis is 1 or 3 long and axis 1 is not. Floats (N, *shape) are never rescaled
    or rearranged. Those of 16 bits stay as they are, and those of an .npy file stay on the disk;
    the others become float32. Values of 2 bytes without a type are bfloat16, see `is_half`.

    An .npz file has the array under `images`, `arr_0` or, for a single array, any name, and perhaps
    labels, (N,) integers, under `labels`, `label` or, beside `arr_0`, `arr_1`.

    Args:
        path: the file.
        floats_as_is: also accept floats that look like images by mistake, see `Arrays`.
        labels_used: whether labels are needed. If not, labels that are not class numbers are left
            out, and the line says so.

    Returns:
        The array (N, *shape), uint8 or float32, or a tensor of float16 or bfloat16; and labels
        (N,), int64, or None.
    """
    path = existing(path)
    with reading(path, KIND):
        loaded = load_arrays(path)
    _check_items(path, loaded.array)
    images = _images(path, loaded.array, floats_as_is)

    labels, about_labels = _labels(path, loaded, labels_used)
    facts = [_described(loaded)]
    if about_labels:
        facts.append(about_labels)
    if loaded.others:
        facts.append(f"not read: {', '.join(map(printable, loaded.others))}")
    say(f"{path}: {'; '.join(facts)}")
    return images, labels


def _check_items(path: Path, array: np.ndarray) -> None:
    """Refuse an array of no items, and one of what are no numbers."""
    if array.size == 0 or array.ndim == 0:
        raise InputError(f"{path} holds no items: its array has the shape {array.shape}")
    is_number = np.issubdtype(array.dtype, np.number) or array.dtype == bool
    if not is_number and not is_half(array.dtype):
        raise InputError(f"{path} holds {array.dtype}, and images are numbers")


def _check_type(path: Path, dtype: np.dtype) -> None:
    """Refuse numbers that are neither uint8 nor floats, which no set stores."""
    if dtype != np.uint8 and not np.issubdtype(dtype, np.floating):
        advice = "give images as uint8, and other numbers as float32"
        raise InputError(f"{path} holds {dtype}: {advice}")


def _images(path: Path, array: np.ndarray, floats_as_is: bool) -> "np.ndarray | Tensor":
    """Return an array as a reference set takes it; refuse types that the set does not store."""
    if array.dtype == np.uint8:
        return _channels_first(path, array)

    floats: np.ndarray | Tensor
    if is_half(array.dtype):
        floats = half_tensor(array)
    else:
        _check_type(path, array.dtype)
        # Values that are too large for float32 become infinite, and the reference set refuses them.
        with np.errstate(over="ignore"):
            floats = np.ascontiguousarray(array, np.float32)

    if not floats_as_is:
        _check_floats(path, floats)
    return floats


def array_file_shape(path: str | os.PathLike[str]) -> tuple[tuple[int, ...], int] | None:
    """Return the shape that `read_array_file` gives, and the bytes of each value.

    It reads no values. For an .npz file it returns None, because its arrays are compressed.
    """
    path = existing(path)
    check_suffix(path)
    if path.suffix.lower() == ".npz":
        return None

    with reading(path, KIND):
        array = np.load(path, mmap_mode="r")
        shape = len(array), *array.shape[1:]

    if is_half(array.dtype):
        return shape, 2
    _check_type(path, array.dtype)
    # Other floats are read as float32.
    if array.dtype != np.uint8:
        return shape, 4
    if _channels_last(shape):
        return (shape[0], shape[3], *shape[1:3]), 1
    return shape, 1


def _labels(path: Path, loaded: Loaded, used: bool) -> tuple[np.ndarray | None, str]:
    """Return the labels, or None, and what the printed line says about them."""
    if loaded.labels is None:
        if used:
            has = "an .npy file has none"
            if loaded.key:
                has = f"the file has {', '.join(map(printable, (loaded.key, *loaded.others)))}"
            rule = f"labels are read from the keys {', '.join(LABEL_KEYS)} of an .npz file"
            raise InputError(f"{path} has no labels: {rule}; {has}")
        return None, ""

    try:
        labels = class_numbers(loaded.labels, len(loaded.array))
    except InputError as error:
        if used:
            raise InputError(f"{path}: {loaded.label_key}: {error}") from error
        return None, f"{loaded.label_key}: left out, because {error}"
    return labels, f"{loaded.label_key}: labels"


def _described(loaded: Loaded) -> str:
    """Say what was taken from a file: "arr_0: 50,000 images, NHWC, 32x32 with 3 channels"."""
    array = loaded.array
    key = f"{printable(loaded.key)}: " if loaded.key else ""
    if array.dtype != np.uint8:
        shape = "x".join(map(str, array.shape[1:]))
        return f"{key}{len(array):,} items of {shape} values, {type_name(array.dtype)}, as they are"

    if _channels_last(array.shape):
        height, width, channels = array.shape[1:]
        layout = "NHWC"
    else:
        channels, height, width = array.shape[1:]
        # With one or three columns, the last axis could be the channels.
        layout = "NCHW (not NHWC)" if width in (1, 3) else "NCHW"
    size = f"{width}x{height} with {channels} channel{'s' if channels > 1 else ''}"
    return f"{key}{len(array):,} images, {layout}, {size}"


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape seems to hold images (N, H, W, C)."""
    return len(shape) == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3)


def _channels_first(path: Path, array: np.ndarray) -> np.ndarray:
    """Return uint8 images as (N, C, H, W)."""
    if _channels_last(array.shape):
        array = np.moveaxis(array, 3, 1)
    if array.ndim != 4 or array.shape[1] not in (1, 3):
        rule = "uint8 images must be (N, C, H, W) with 1 or 3 channels"
        advice = "gray images (N, H, W) are images[:, None], one image is image[None]; transparency is not read"
        raise InputError(f"{path}: {rule}, got shape {array.shape}; {advice}")
    return np.ascontiguousarray(array)


def _check_floats(path: Path, array: "np.ndarray | Tensor") -> None:
    """Refuse float images in a wrong layout or range."""
    if _channels_last(array.shape):
        looks = f"float array of shape {array.shape} looks like images with the channels last"
        advice = "give (N, C, H, W), or set floats_as_is if it is meant"
        raise InputError(f"{path}: {looks}; floats are never rearranged: {advice}")

    # Values without a negative one are probably in [0, 1], and not in model space.
    is_image = array.ndim == 4 and array.shape[1] in (1, 3)
    low, high = array.min(), array.max()
    if is_image and (low < -1 or low >= 0 or high > 1):
        values = f"float images with values from {low:g} to {high:g}"
        advice = "give uint8, or floats in [-1, 1], or set floats_as_is if these values are meant"
        raise InputError(f"{path}: {values}; floats are never rescaled: {advice}")
