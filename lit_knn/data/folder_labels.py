"""Class labels from folders: one folder for each class, as torchvision's `ImageFolder` reads them."""

import zipfile
from pathlib import Path

import numpy as np

from lit_knn.common.errors import InputError, printable


def folder_labels(path: Path, image_names: list[str]) -> np.ndarray:
    """Number the top-level folders in the order of their names, from 0, and label each image by its folder.

    Args:
        path: the zip or folder that holds the class folders, for messages.
        image_names: relative to `path`, such as `cat/0.png`.

    Returns:
        (N,), int64, in the order of `image_names`.

    Raises:
        InputError: an image is in no folder.
    """
    outside = next((name for name in image_names if "/" not in name), None)
    if outside is not None:
        raise InputError(
            f"{path}: labels from folders need every image in the folder of its class, {printable(outside)} is in none"
        )
    return np.unique([_top(name) for name in image_names], return_inverse=True)[1].astype(np.int64)


def check_class_folders(path: Path, image_names: list[str]) -> None:
    """Refuse folders that are no classes: they are usually those of another level, such as `train` and `test`.

    Raises:
        InputError: an image is in a folder inside another, a folder has no image, or there is only one folder.
    """
    nested = next((name for name in image_names if name.count("/") > 1), None)
    if nested is not None:
        raise InputError(
            f"{path}: labels from folders need every image directly in the folder of its class, but "
            f"{printable(nested)} is {nested.count('/')} folders deep"
        )
    classes = {_top(name) for name in image_names if "/" in name}
    empty = sorted(_top_folders(path) - classes)
    if empty:
        raise InputError(f"{path}: labels from folders: the folder {printable(empty[0])} holds no image")
    if len(classes) == 1:
        raise InputError(f"{path}: labels from folders need several folders, there is only {printable(*classes)}")


def _top(name: str) -> str:
    return name.partition("/")[0]


def _top_folders(path: Path) -> set[str]:
    """Return the names of the folders in a zip or folder, without hidden ones and those that macOS adds to zips."""
    if path.is_dir():
        names = {entry.name for entry in path.iterdir() if entry.is_dir()}
    else:
        with zipfile.ZipFile(path) as archive:
            names = {_top(name) for name in archive.namelist() if "/" in name}
    return {name for name in names if not name.startswith(".") and name != "__MACOSX"}
