"""The arrays in a NumPy file: which are the images, and which their labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_knn.common.errors import InputError, printable
from lit_knn.data.array_tensors import is_half

IMAGE_KEYS = ("images", "arr_0")
# ADM's samples have their labels in arr_1.
LABEL_KEYS = ("labels", "label", "arr_1")


class Loaded(NamedTuple):
    """The arrays of a file, before they are checked."""

    array: np.ndarray
    labels: np.ndarray | None
    key: str  # the array's name in an .npz file; "" for an .npy file
    label_key: str  # the labels' name; "" without labels
    others: list[str]  # names of the arrays that are not read


def load_arrays(path: Path) -> Loaded:
    """Load the array and the labels of a file. Floats of 16 bits in an `.npy` file stay on the disk."""
    check_suffix(path)
    loaded = np.load(path, mmap_mode="r")
    if isinstance(loaded, np.ndarray):
        array = loaded if is_half(loaded.dtype) else np.load(path)
        return Loaded(array, None, "", "", [])

    with loaded:
        key = _array_key(path, loaded.files)
        label_key = _label_key(loaded.files, key)
        labels = loaded[label_key] if label_key else None
        others = [other for other in loaded.files if other not in (key, label_key)]
        return Loaded(loaded[key], labels, key, label_key, others)


def check_suffix(path: Path) -> None:
    """Refuse a file whose suffix is not one of NumPy's."""
    if path.suffix.lower() not in (".npy", ".npz"):
        advice = "; a folder or zip of images is read with --data ImageFiles"
        raise InputError(f"{path} is neither an .npy nor an .npz file{advice}")


def _array_key(path: Path, keys: Sequence[str]) -> str:
    """Return the key of the images, latents or vectors."""
    for key in IMAGE_KEYS:
        if key in keys:
            return key

    others = [key for key in keys if key not in LABEL_KEYS]
    if len(others) != 1:
        names = ", ".join(map(printable, keys)) or "nothing"
        rule = "must hold the array under the key images, arr_0 or as the only array"
        raise InputError(f"{path} {rule}, found: {names}")
    return others[0]


def _label_key(keys: Sequence[str], array_key: str) -> str:
    """Return the key of the labels, "" if there are none."""
    for key in LABEL_KEYS:
        # Beside an array of another name than arr_0, arr_1 may be anything.
        if key in keys and (key != "arr_1" or array_key == "arr_0"):
            return key
    return ""
