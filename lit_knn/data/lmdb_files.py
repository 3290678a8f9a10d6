"""Images in an LMDB, as LSUN is published: a key for each encoded image."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from lit_knn.common.errors import InputError, printable, reading
from lit_knn.data.files import Files, ImageLabels, say

if TYPE_CHECKING:
    import lmdb

LMDB_FILE = "data.mdb"
SUFFIXES = (".lmdb", ".mdb")
# Keys of what other programs write beside the images.
NO_IMAGES = ("length", "__len__", "__keys__", "num-samples")
ADVICE = "an LMDB has none; unpack it into a folder for each class"


def is_lmdb(path: Path) -> bool:
    """Return whether a path is the folder of an LMDB, or its file."""
    return (path / LMDB_FILE).is_file() or (path.is_file() and path.suffix.lower() in SUFFIXES)


def lmdb_files(path: Path) -> Files:
    """List the images of an LMDB by their keys, in its order."""
    file = path / LMDB_FILE if path.is_dir() else path
    status = file.stat()
    with reading(path, " as an LMDB"):
        environment = _environment(str(file.resolve()), status.st_dev, status.st_ino)
        with environment.begin() as transaction:
            # Latin-1 has a character for every byte.
            keys = [key.decode("latin-1") for key in transaction.cursor().iternext(values=False)]

    names = [key for key in keys if key not in NO_IMAGES]
    if not names:
        raise InputError(f"{path} holds no images: it has no keys of images")
    if len(names) < len(keys):
        others = ", ".join(printable(key) for key in keys if key in NO_IMAGES)
        say(f"{path}: keys that are not of images are left out: {others}")

    def read(name: str) -> bytes:
        with environment.begin() as transaction:
            return transaction.get(name.encode("latin-1")) or b""

    stamp = (status.st_size, status.st_mtime_ns)
    return Files(path, names, names, read, lambda name: stamp, ImageLabels(), ADVICE)


@functools.cache
def _environment(path: str, device: int, inode: int) -> "lmdb.Environment":
    """Open an LMDB once in a process, because the library refuses to open a file again while it is open.

    `device` and `inode` are of its file, because another one may later have the same path.
    """
    import lmdb

    # Another process may read it, too, and the folder may be read-only.
    return lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False)
