"""Opens a copy of a data set that the user names as a reference set."""

from pathlib import Path

import torch

from lit_knn.data.array_files import read_array_file
from lit_knn.data.image_files import read_image_files
from lit_knn.data.prepared import read_prepared
from lit_knn.index import Index
from lit_knn.reference import ReferenceSet


def reference_from(path: Path, index: Index | None = None, hflip: bool = False) -> ReferenceSet:
    """Read images from a zip, folder, .npy or .npz. Prepared images, with a .json beside them, stay mapped on the disk.

    Raises:
        InputError: the path does not exist, or cannot be read as images.
    """
    if path.suffix == ".npy" and path.with_suffix(".json").exists():
        prepared = read_prepared(path)
        made = ReferenceSet(prepared.images, index, hflip, prepared.labels, prepared.sha256)
        made.watch(prepared.check_file)
        return made
    read = read_array_file if path.suffix in (".npy", ".npz") else read_image_files
    images, labels = read(path)
    return ReferenceSet(torch.as_tensor(images), index, hflip, labels)
