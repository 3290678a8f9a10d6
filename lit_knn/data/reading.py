"""Reads sets of images without Lightning: any file or folder as a reference set, and the digits of scikit-learn."""

import os
from pathlib import Path

import numpy as np

from lit_knn.data.array_files import read_array_file
from lit_knn.data.image_files import read_image_files
from lit_knn.data.prepared import is_prepared, read_prepared
from lit_knn.index import Index
from lit_knn.reference import ReferenceSet


def reference_from(
    path: str | os.PathLike[str],
    index: Index | None = None,
    hflip: bool = False,
    floats_as_is: bool = False,
) -> ReferenceSet:
    """Read images as a reference set. Prepared images, with a .json, stay on the disk.

    Args:
        path: a zip, a folder, an .npy or an .npz file.
        index: neighbour index; see `ReferenceSet`.
        hflip: also count mirror images; see `ReferenceSet`.
        floats_as_is: also accept floats that look like images by mistake, as latents may; see `read_array_file`.
    """
    path = Path(path).expanduser()
    if is_prepared(path):
        prepared = read_prepared(path)
        return ReferenceSet(prepared.images, index, hflip, prepared.labels, prepared.sha256)

    if path.suffix.lower() in (".npy", ".npz"):
        images, labels = read_array_file(path, floats_as_is)
    else:
        images, labels, _ = read_image_files(path)
    return ReferenceSet(images, index, hflip, labels)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's 1,797 digits, (N, 1, 8, 8) uint8, and their labels.

    Their values from 0 to 16 are spread over 0 to 255.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None], digits.target
