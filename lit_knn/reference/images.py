"""Images as a reference set stores them: how they are checked, and how they are converted to model space."""

import math
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError, class_and_line, reading
from lit_knn.common.memory import is_out_of_memory

# Types in which images are stored as they come. Other floats are stored as float32.
STORED_TYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
# Bytes of float32 images that are converted at a time.
CHUNK_BYTES = 64 * 2**20
# float32 could not hold the squared distances of larger values.
LARGEST_VALUE = 1e15
# The squared distances of far smaller values would be 0 in float32; the limit leaves a margin.
LEAST_VALUE = 1e-15


def to_model_space(images: Tensor) -> Tensor:
    """Map pixels p to p / 127.5 − 1; floats keep their values, and those of 16 bits become float32."""
    if images.dtype != torch.uint8:
        return images.to(torch.promote_types(images.dtype, torch.float32))
    return images.float().div_(127.5).sub_(1.0)


def images_of(images: Tensor, hflip: bool, ids: Tensor) -> Tensor:
    """Gather stored images in model space.

    Args:
        images: (N, *shape), as they are stored.
        hflip: whether id i + N is the mirror image of image i.
        ids: of any shape, in [0, N), or in [0, 2N) with `hflip`.

    Returns:
        (*ids.shape, *shape), float32.
    """
    stored = len(images)
    flat = ids.reshape(-1)
    x = to_model_space(images.index_select(0, flat % stored))

    if hflip:
        one_per_axis = [1] * (images.ndim - 1)
        mirrored = (flat >= stored).reshape(-1, *one_per_axis)
        x = torch.where(mirrored, x.flip(-1), x)
    return x.reshape(*ids.shape, *images.shape[1:])


def stored_chunks(images: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Stream stored images (N, *shape), at most `rows` at a time.

    Yields:
        The number of the first image, and the images (c, *shape), float32, in model space.
    """
    for start in range(0, len(images), rows):
        yield start, to_model_space(images[start : start + rows])


def chunk_rows(d: int) -> int:
    """Return how many images of dimension d are converted to float32 at a time, in a pass over all images."""
    return max(CHUNK_BYTES // (4 * d), 1)


# Checks of the arguments of a set


def tensor_of(images: object, what: str = "images") -> Tensor:
    """Return a tensor or array as a tensor, without a copy where possible.

    Raises InputError for a path and for what is no numbers. `what` is its name in messages.
    """
    if isinstance(images, (str, os.PathLike)):
        advice = f"lit_knn.data.reading.reference_from({os.fspath(images)!r}) reads a file"
        raise InputError(f"{what} must be a tensor or an array, got a path; {advice}")
    if isinstance(images, np.ndarray):
        # PyTorch has no numbers in the byte order of other machines, in which some files store them.
        images = images.astype(images.dtype.newbyteorder("="), copy=False)
        # Nor can it hold an array that runs backwards.
        if min(images.strides, default=0) < 0:
            images = images.copy()
    elif isinstance(images, list | tuple) and images and all(map(_is_image, images)):
        with reading("a list of images", " as one tensor"):
            images = torch.stack(tuple(images))
    try:
        return torch.as_tensor(images)
    # An object of a user's may fail in any way when it is asked for its values.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = f"{what} must be a tensor or an array of numbers, got {type(images).__name__}"
        advice = "; of a data set, stack its items" if what == "images" else ""
        raise InputError(f"{problem}{advice} ({class_and_line(error)})") from error


def _is_image(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def check_images(images: Tensor, hflip: bool) -> None:
    """Raise InputError for images of a shape or type that a reference set cannot hold, or cannot mirror."""
    if images.ndim < 2 or images.numel() == 0:
        raise InputError(f"images must be (N, *shape) with N >= 1, got shape {tuple(images.shape)}")

    pixels = images.dtype == torch.uint8
    if not pixels and not images.dtype.is_floating_point:
        advice = "give images as uint8, and other numbers as float32"
        raise InputError(f"images must be uint8 or float, got {images.dtype}; {advice}")

    # With at most 4 values in the last axis and more in the two before, the last axis must be the colours.
    channels_last = images.ndim == 4 and min(images.shape[1:3]) > 4 >= images.shape[3]
    if (hflip or pixels) and (images.ndim != 4 or channels_last):
        kind = "hflip=True needs images" if hflip else "uint8 images must be"
        raise InputError(f"{kind} (N, C, H, W), got shape {tuple(images.shape)}")


def largest_value(images: Tensor) -> float:
    """Return an upper bound of absolute values in model space.

    It reads the images in pieces, because they may be a mapped file that is larger than memory.

    Raises:
        InputError: floats are not finite, or so large or small that float32 could not hold their distances.
    """
    if images.dtype == torch.uint8:
        return 1.0

    largest = 0.0
    for start, x in stored_chunks(images, chunk_rows(math.prod(images.shape[1:]))):
        largest_here = torch.stack(x.aminmax()).abs().max().item()
        if not math.isfinite(largest_here):
            # The first row that is not finite everywhere.
            row = start + int(x.flatten(1).isfinite().all(1).int().argmin())
            raise InputError(f"images hold a value that is not finite (first in item {row})")
        largest = max(largest, largest_here)

    if 0 < largest < LEAST_VALUE:
        limit = f"float32 holds squared distances of values from {LEAST_VALUE:g}"
        raise InputError(f"images hold no value above {largest:.3g}; {limit}: scale the data")
    if largest > LARGEST_VALUE:
        limit = f"float32 holds squared distances of values up to {LARGEST_VALUE:g}"
        raise InputError(f"images hold a value of size {largest:.3g}; {limit}: scale the data")
    return largest


def expand_labels(labels: Tensor | np.ndarray | None, stored: int, hflip: bool) -> Tensor | None:
    """Check labels, and repeat them for mirror images.

    Args:
        labels: (stored,) integers, or None.
        stored: number of stored images.
        hflip: whether every image has a mirror image.

    Returns:
        Labels of all images, mirrored ones included, (N,) int64, on the CPU; or None.
    """
    if labels is None:
        return None

    labels = tensor_of(labels, "labels").cpu()
    # PyTorch does not compare uint64. Its largest numbers become negative.
    numbers = labels.long()
    if labels.shape != (stored,) or labels.is_floating_point() or (numbers < 0).any():
        description = f"{tuple(labels.shape)} {labels.dtype}"
        if len(numbers.flatten()):
            description += f", at least {numbers.min()}"
        raise InputError(f"labels must be ({stored},) integers from 0, got {description}")

    return torch.cat([numbers, numbers]) if hflip else numbers
