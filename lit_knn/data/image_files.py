"""Zips and folders of image files: their pixels and their class labels."""

import io
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from lit_knn.common.errors import InputError, printable
from lit_knn.data.files import Files, is_hidden, opened, reading

LABEL_FILE = "dataset.json"
# (N,) int64 and the names of the classes 0, 1, …; each may be None.
NamedLabels = tuple[np.ndarray | None, list[str] | None]


def read_image_files(
    path: str | os.PathLike[str], labels_from_folders: bool = False
) -> tuple[np.ndarray, np.ndarray | None, list[str] | None]:
    """Read a zip or a folder in the layout of EDM's data sets.

    Every PNG and JPEG file, in subfolders too, is one image. Images are sorted by name. Hidden and other files are
    ignored. The result is `images` (N, C, H, W), uint8, C = 3 for colour (a palette becomes its colours) or 1 for
    grayscale, and the labels and names of classes of `image_labels`.
    """
    from tqdm import tqdm

    with opened(path) as files:
        (labels, class_names), names = image_labels(files, labels_from_folders), files.images
        first = decode(files, names[0])
        images = np.empty((len(names), *first.shape), np.uint8)
        bar = tqdm(names, desc=f"Reading {files.path.name}", unit=" images", disable=None, leave=False)
        for i, name in enumerate(bar):
            image = decode(files, name)
            check_same_size(names[0], first.shape, name, image.shape)
            images[i] = image
    return images, labels, class_names


def count_image_files(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the shape (N, C, H, W) of `read_image_files`; this reads only the file names and the first image."""
    with opened(path) as files:
        return len(files.images), *decode(files, files.images[0]).shape


def check_same_size(first: str, shape: tuple[int, ...], name: str, other: tuple[int, ...]) -> None:
    """Refuse the image `name` of shape `other`, (C, H, W), if the image `first` has another `shape`."""
    if other != shape:
        raise InputError(
            f"all images must have one size and number of channels, but {printable(first)} is {_size(shape)} "
            f"and {printable(name)} is {_size(other)}; lit-knn prepare makes them alike with --size and --rgb"
        )


def _size(shape: tuple[int, ...]) -> str:
    channels, height, width = shape
    return f"{width}x{height} with {channels} channel{'s' if channels > 1 else ''}"


def decode(files: Files, name: str, change: Callable[[Any], Any] | None = None) -> np.ndarray:
    """Decode the image `name` to (C, H, W), uint8; `change` gets the `PIL.Image`, RGB if it has an opaque palette."""
    from PIL import Image, UnidentifiedImageError

    where = f"{files.path}: {printable(name)}"
    with reading(where, " as an image"):
        try:
            image: Image.Image = Image.open(io.BytesIO(files.read(name)), formats=("PNG", "JPEG"))
        except UnidentifiedImageError as error:
            raise InputError(f"{where} is not an image, as PNG or JPEG") from error
        if image.mode == "P" and "transparency" not in image.info:
            image = image.convert("RGB")
        if change is not None:
            image = change(image)
        pixels = np.asarray(image)
    if image.mode not in ("RGB", "L"):
        kind = "palette with transparency" if image.mode == "P" else image.mode
        raise InputError(f"{where} has mode {kind}; only RGB, palette and 8-bit grayscale (L) images are read")
    return pixels[None] if image.mode == "L" else pixels.transpose(2, 0, 1)


def image_labels(files: Files, from_folders: bool) -> NamedLabels:
    """Return the labels of `files.images`, (N,) int64, and the names of the classes; each may be None.

    `dataset.json` at the root, if any, has one label for each image, {"labels": [["00000/img00000.png", 6], ...]}, or
    {"labels": null}. With `from_folders` it is not read: the folders are numbered in the order of their names, from 0,
    as torchvision's `ImageFolder` does, and each image must lie directly in the folder of its class.
    """
    return _folder_labels(files) if from_folders else (_listed_labels(files), None)


def _folder_labels(files: Files) -> tuple[np.ndarray, list[str]]:
    where = f"{files.path}: labels from folders"
    # Folders such as `train` and `test` above the classes would become the classes.
    odd = next((name for name in files.images if name.count("/") != 1), None)
    if odd is not None:
        place = f"{odd.count('/')} folders deep" if "/" in odd else "in none"
        raise InputError(f"{where} need each image directly in the folder of its class; {printable(odd)} is {place}")
    folders = {name.partition("/")[0] for name in files.names if "/" in name and not is_hidden(name)}
    classes, labels = np.unique([name.partition("/")[0] for name in files.images], return_inverse=True)
    empty = sorted(folders - set(classes))
    if empty:
        raise InputError(f"{where}: the folder {printable(empty[0])} holds no image")
    if len(classes) == 1:
        raise InputError(f"{where} need several folders, there is only {printable(classes[0])}")
    return labels.astype(np.int64), classes.tolist()


def _listed_labels(files: Files) -> np.ndarray | None:
    if LABEL_FILE not in files.names:
        elsewhere = [name for name in files.names if name.endswith(f"/{LABEL_FILE}")]
        if elsewhere:
            raise InputError(f"{files.path}: {LABEL_FILE} must be at the root, found {printable(elsewhere[0])}")
        return None
    where, label_of = f"{files.path}: {LABEL_FILE}", {}
    with reading(where, advice='; it must be {"labels": [[file name, integer], ...]}'):
        listed = json.loads(files.read(LABEL_FILE))["labels"]
        for entry in [] if listed is None else listed:
            match entry:
                # In Python, True is an integer.
                case [str(name), int(label)] if type(label) is int and 0 <= label < 2**31 and name not in label_of:
                    label_of[name] = label
                case _:
                    rule = "must list each image once, as [file name, integer from 0]"
                    raise InputError(f"{where} {rule}, but has {entry!r:.80}")
    if listed is None:
        return None
    odd = sorted(label_of.keys() ^ set(files.images))
    if odd:
        wrong = f"names {printable(odd[0])}, which is no image" if odd[0] in label_of else f"lacks {printable(odd[0])}"
        raise InputError(f"{where} has {len(label_of)} labels for {len(files.images)} images; it {wrong}")
    return np.array([label_of[name] for name in files.images], np.int64)
