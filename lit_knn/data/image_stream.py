"""Images of any file or folder in batches. Each pass decodes image files anew, so that they need little memory."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import prefixed
from lit_knn.data.decoding import decode
from lit_knn.data.image_files import check_image_files, check_same_size
from lit_knn.data.reading import reference_from
from lit_knn.data.stores import opened
from lit_knn.reference import ReferenceSet
from lit_knn.reference.images import to_model_space


@dataclass(frozen=True)
class ImageStream:
    """A set of images that is read in passes."""

    name: str  # path of the images, or another name
    count: int
    shape: tuple[int, ...]  # of one image: (C, H, W) of pictures
    is_bytes: bool  # uint8 pixels, and not floats in model space
    batches: Callable[[int], Iterator[Tensor]]  # (size) -> images (size, *shape) as they are stored

    def numbered_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield numbers (b,), from 0, and images (b, *shape), float32 in model space, at most `size` at a time."""
        start = 0
        for stored in self.batches(size):
            yield torch.arange(start, start + len(stored)), to_model_space(stored)
            start += len(stored)


def stream_of_path(path: str | os.PathLike[str], floats_as_is: bool = False) -> ImageStream:
    """Open images for reading in passes.

    Args:
        path: whatever `lit-knn prepare` reads, an .npy or .npz file of arrays, or a prepared file.
        floats_as_is: see `lit_knn.data.array_files.read_array_file`.
    """
    # Completion of a shell adds the slash to a folder's name. The table has one name for it.
    name = os.fspath(path).rstrip("/")
    if Path(name).suffix.lower() in (".npy", ".npz"):
        return stream_of_set(reference_from(path, floats_as_is=floats_as_is), name)

    count, *shape = check_image_files(name)

    def batches(size: int) -> Iterator[Tensor]:
        return _decoded(name, size)

    return ImageStream(name, count, tuple(shape), True, batches)


def stream_of_set(images: ReferenceSet, name: str) -> ImageStream:
    """Return the stored images of a set, without mirror images, as a stream."""
    is_bytes = images.images.dtype == torch.uint8

    def batches(size: int) -> Iterator[Tensor]:
        return iter(images.images.split(size))

    return ImageStream(name, len(images.images), images.shape, is_bytes, batches)


def _decoded(path: str, size: int) -> Iterator[Tensor]:
    """Decode image files, in the order of their names, `size` at a time: (size, C, H, W), uint8."""
    with opened(path) as files, prefixed(str(files.path)):
        first, shape = files.images[0], None

        for start in range(0, len(files.images), size):
            pixels = []
            for name in files.images[start : start + size]:
                image = decode(files.read, name)
                shape = shape or image.shape
                check_same_size(first, shape, name, image.shape)
                pixels.append(image)
            yield torch.from_numpy(np.stack(pixels))
