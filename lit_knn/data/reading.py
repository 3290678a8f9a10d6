"""Opens any file or folder of images as a reference set."""

import os
from pathlib import Path

from lit_knn.data.array_files import read_array_file
from lit_knn.data.image_files import read_image_files
from lit_knn.data.prepared import read_prepared
from lit_knn.index import Index
from lit_knn.reference import ReferenceSet


def reference_from(path: str | os.PathLike[str], index: Index | None = None, hflip: bool = False) -> ReferenceSet:
    """Read images from a zip, folder, .npy or .npz. Prepared images, with a .json beside them, stay mapped on the disk.

    Raises:
        InputError: the path does not exist, or cannot be read as images.
    """
    path = Path(path).expanduser()
    if path.suffix == ".npy" and path.with_suffix(".json").exists():
        prepared = read_prepared(path)
        made = ReferenceSet(prepared.images, index, hflip, prepared.labels, prepared.sha256)
        made.watch(prepared.check_file)
        return made
    read = read_array_file if path.suffix in (".npy", ".npz") else read_image_files
    images, labels = read(path)
    return ReferenceSet(images, index, hflip, labels)
