"""Reads folders, zips and other stores of images into memory: their pixels and their class labels."""

import os

import numpy as np

from lit_knn.common.errors import InputError, prefixed, printable
from lit_knn.common.progress import progress_bar
from lit_knn.data.bad_images import BadImageError, bad_images
from lit_knn.data.decoding import decode, header
from lit_knn.data.files import Files
from lit_knn.data.labels import image_labels
from lit_knn.data.stores import opened


def read_image_files(
    path: str | os.PathLike[str],
    labels_from_folders: bool = False,
    labels_used: bool = False,
    label_key: str | None = None,
) -> tuple[np.ndarray, np.ndarray | None, list[str] | None]:
    """Read a zip or a folder in the layout of EDM's data sets, or another store of images.

    Every image file, in subfolders too, is one image. Images are sorted by name. Hidden and other
    files are ignored.

    Args:
        path: see `lit_knn.data.stores.opened`.
        labels_from_folders: label each image by its folder instead of `dataset.json`.
        labels_used: refuse images without labels; see `image_labels`.
        label_key: see `lit_knn.data.stores.opened`.

    Returns:
        `images` (N, C, H, W), uint8, C = 3 for colour or 1 for grayscale; and the labels and the
        names of the classes, see `image_labels`.

    Raises:
        InputError: a file is bad, or the images have several sizes.
    """
    with opened(path, label_key) as files:
        labels, class_names, _ = image_labels(files, labels_from_folders, labels_used)
        with prefixed(str(files.path)):
            images = _all_images(files)
    return images, labels, class_names


def count_image_files(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the shape (N, C, H, W) of the images of `read_image_files`; only the first image is read."""
    with opened(path) as files, prefixed(str(files.path)):
        return len(files.images), *decode(files.read, files.images[0]).shape


def check_image_files(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return what `count_image_files` does, and refuse images of several sizes before any is used.

    Only those whose headers differ from the first image's, or have Exif tags, are decoded.
    """
    with opened(path) as files, prefixed(str(files.path)):
        first, *others = files.images
        shape, common = decode(files.read, first).shape, header(files.read, first)

        with progress_bar(len(others), f"Checking {files.path.name}", " images", delay=1.0) as bar:
            for name in others:
                of_file = header(files.read, name)
                if of_file is None or of_file != common:
                    check_same_size(first, shape, name, decode(files.read, name).shape)
                bar.update()
        return len(files.images), *shape


def read_image_labels(
    path: str | os.PathLike[str], labels_from_folders: bool = False, label_key: str | None = None
) -> np.ndarray | None:
    """Return the labels that `read_image_files` returns, without reading images; refuse images without labels."""
    with opened(path, label_key) as files:
        return image_labels(files, labels_from_folders, used=True).numbers


def check_same_size(first: str, shape: tuple[int, ...], name: str, other: tuple[int, ...]) -> None:
    """Refuse an image that has another size or number of channels than the first one.

    Args:
        first: name of the first image.
        shape: its shape, (C, H, W).
        name: name of the other image.
        other: its shape.
    """
    if other != shape:
        rule = "all images must have one size and number of channels"
        sizes = f"{printable(first)} is {_size(shape)} and {printable(name)} is {_size(other)}"
        advice = "lit-knn prepare makes them alike with --size and --rgb"
        raise InputError(f"{rule}, but {sizes}; {advice}")


def _all_images(files: Files) -> np.ndarray:
    """Decode all images, or raise one error that tells of all bad files."""
    names, problems = files.images, []
    first = ""  # name of the first image that is not bad, which sets the size of all
    images = np.empty(0, np.uint8)

    with progress_bar(len(names), f"Reading {files.path.name}", " images") as bar:
        for i, name in enumerate(names):
            bar.update()
            try:
                image = decode(files.read, name)
            except BadImageError as error:
                problems.append(str(error))
                continue

            if not first:
                first, images = name, np.empty((len(names), *image.shape), np.uint8)
            check_same_size(first, images.shape[1:], name, image.shape)
            images[i] = image

    if problems:
        advice = "lit-knn prepare --skip-bad leaves such files out"
        raise bad_images(problems, len(names), advice)
    return images


def _size(shape: tuple[int, ...]) -> str:
    """Describe a shape (C, H, W) in a message."""
    channels, height, width = shape
    return f"{width}x{height} with {channels} channel{'s' if channels > 1 else ''}"
