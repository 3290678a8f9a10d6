"""Images in an LMDB, as LSUN is published: a key for each encoded image. It needs the extra `hub`."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from lit_knn.data.files import Files, ImageLabels

if TYPE_CHECKING:
    import lmdb

LMDB_FILE = "data.mdb"
ADVICE = "an LMDB has none; unpack it into a folder for each class"


def is_lmdb(path: Path) -> bool:
    """Return whether a path is the folder of an LMDB."""
    return (path / LMDB_FILE).is_file()


def lmdb_files(path: Path) -> Files:
    """List the images of an LMDB by their keys, in its order."""
    status = (path / LMDB_FILE).stat()
    environment = _environment(str(path.resolve()), status.st_dev, status.st_ino)
    with environment.begin() as transaction:
        # Latin-1 has a character for every byte.
        names = [key.decode("latin-1") for key in transaction.cursor().iternext(values=False)]

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
    return lmdb.open(path, readonly=True, lock=False, readahead=False)
