"""Images in an LMDB, as LSUN is published: a key for each encoded image. It needs the extra `hub`."""

from pathlib import Path

from lit_knn.data.files import Files, ImageLabels

LMDB_FILE = "data.mdb"
ADVICE = "an LMDB has none; unpack it into a folder for each class"


def is_lmdb(path: Path) -> bool:
    """Return whether a path is the folder of an LMDB."""
    return (path / LMDB_FILE).is_file()


def lmdb_files(path: Path) -> Files:
    """List the images of an LMDB by their keys, in its order."""
    import lmdb

    # Another process may read it, too, and the folder may be read-only.
    environment = lmdb.open(str(path), readonly=True, lock=False, readahead=False)
    with environment.begin() as transaction:
        # Latin-1 has a character for every byte.
        names = [key.decode("latin-1") for key in transaction.cursor().iternext(values=False)]

    def read(name: str) -> bytes:
        with environment.begin() as transaction:
            return transaction.get(name.encode("latin-1")) or b""

    status = (path / LMDB_FILE).stat()
    stamp = (status.st_size, status.st_mtime_ns)
    return Files(path, names, names, read, lambda name: stamp, ImageLabels(), ADVICE)
