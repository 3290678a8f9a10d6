"""Read zips and folders of image files from disk into arrays."""

import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from lit_knn.common.errors import InputError, first_line, printable
from lit_knn.data.files import DAMAGED, Files, check_memory, opened
from lit_knn.data.image_labels import image_labels


def read_image_files(
    path: str | os.PathLike[str], labels_from_folders: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """Read a zip or a folder in the layout of EDM's data sets.

    Every PNG and JPEG file, in subfolders too, is one image. Images are sorted by name. Hidden and other files are
    ignored. The labels are those of `image_labels`.

    Args:
        path: a .zip file or a folder.
        labels_from_folders: label each image by its folder; `dataset.json` is not read.

    Returns:
        `images` (N, C, H, W), uint8, C = 3 for colour (a palette becomes its colours) or 1 for grayscale, and
        `labels` (N,), int64, or None.

    Raises:
        InputError: a path that does not exist; no images; an image that is damaged, that differs from the first in
            size or number of channels, or that is neither RGB, palette nor 8-bit grayscale; labels that do not match,
            or folders that are no classes.
    """
    with opened(path) as files:
        labels = image_labels(files, labels_from_folders)
        return _read_images(files), labels


def count_image_files(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the shape (N, C, H, W) of `read_image_files`; this reads only the file names and the first image.

    Raises:
        InputError: a path that does not exist, no images, or a first image that cannot be read.
    """
    with opened(path) as files:
        return len(files.images), *decode(files, files.images[0]).shape


def _read_images(files: Files) -> np.ndarray:
    from tqdm import tqdm

    path, names = files.path, files.images
    first = decode(files, names[0])
    check_memory(path, len(names) * first.size, f"{len(names):,} images of {describe_size(first)}")
    images = np.empty((len(names), *first.shape), np.uint8)
    for i, name in enumerate(tqdm(names, desc=f"Reading {path.name}", unit=" images", disable=None, leave=False)):
        image = decode(files, name)
        advice = "; `lit-knn prepare --size S` makes them one size"
        check_same_size(f"{path}: ", (names[0], first), (name, image), advice)
        images[i] = image
    return images


def check_same_size(where: str, first: tuple[str, np.ndarray], other: tuple[str, np.ndarray], advice: str) -> None:
    """Refuse an image of another size or number of channels than the first; both are given with their names."""
    if first[1].shape != other[1].shape:
        sizes = " and ".join(f"{printable(name)} is {describe_size(image)}" for name, image in (first, other))
        raise InputError(f"{where}all images must have one size and number of channels, but {sizes}{advice}")


def describe_size(image: np.ndarray) -> str:
    """Describe an image (C, H, W) in words: width, height and channels."""
    channels, height, width = image.shape
    return f"{width}x{height} with {channels} channel{'s' if channels > 1 else ''}"


def decode(files: Files, name: str, change: Callable[[Any], Any] | None = None) -> np.ndarray:
    """Decode the image `name` to (C, H, W), uint8.

    `change` changes the `PIL.Image` before its pixels are taken; an opaque palette is then already RGB.

    Raises:
        InputError: a file that is not an image, a damaged image, or an unsupported mode.
    """
    from PIL import Image, UnidentifiedImageError

    where = f"{files.path}: {printable(name)}"
    damaged: tuple[type[Exception], ...] = (Image.DecompressionBombError, *DAMAGED)
    try:
        # Other formats have readers that need far more memory, or that start other programs.
        with Image.open(io.BytesIO(files.read(name)), formats=("PNG", "JPEG")) as image:
            opaque_palette = image.mode == "P" and "transparency" not in image.info
            plain = image.convert("RGB") if opaque_palette else image
            changed = plain if change is None else change(plain)
            mode = changed.mode
            pixels = np.asarray(changed)
    except InputError:
        raise
    except UnidentifiedImageError as error:
        raise InputError(f"{where} is not an image, as PNG or JPEG") from error
    except damaged as error:
        raise InputError(f"{where} cannot be read as an image: {first_line(error):.300}") from error
    if mode not in ("RGB", "L"):
        kind = "palette with transparency" if mode == "P" else mode
        raise InputError(f"{where} has mode {kind}; only RGB, palette and 8-bit grayscale (L) images are read")
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
