"""Folders and zips of files: what is in them, and how it is read."""

import functools
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from lit_knn.common.errors import InputError, printable, reading
from lit_knn.data.file_names import advice_for, choose_images, left_out_line, nothing_read

T = TypeVar("T")

# (name) -> size of a file, and its time of change or CRC; it needs no reading.
Stamp = Callable[[str], tuple[int, int]]


class Files(NamedTuple):
    """The files of a folder or zip."""

    path: Path
    # Names are relative to the root. Those of folders end with a slash.
    names: list[str]  # of files and folders
    images: list[str]  # of the image files that are read, sorted, without hidden ones
    read: Callable[[str], bytes]  # (name) -> content of a file
    stamp: Stamp


@functools.cache
def say(text: str) -> None:
    """Print a line about the data, on the first rank, and only once: a run opens its data twice."""
    # Only a trainer has ranks, and knows them before they meet. To prepare images needs neither.
    if "pytorch_lightning" in sys.modules:
        from pytorch_lightning.utilities import rank_zero_only

        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return
    print(printable(text), file=sys.stderr)


def existing(path: str | os.PathLike[str]) -> Path:
    """Return the path of data; raise InputError if it does not exist."""
    if not os.fspath(path):
        raise InputError("the path of the data is empty")
    path = Path(path).expanduser()
    if not path.exists():
        raise InputError(f"{printable(str(path))} does not exist")
    return path


def with_slashes(name: str) -> str:
    """Return the name of a file with slashes between folders, and without "./" at the beginning.

    Programs of Windows put backslashes into zips, and others put "./" before each name.
    """
    return name.replace("\\", "/").removeprefix("./")


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Files]:
    """Open a folder or zip of images. One line says how many image files are left out."""
    path = existing(path)
    if path.is_dir():
        yield _folder(path)
        return

    if path.suffix.lower() != ".zip":
        raise InputError(f"{path} is neither a folder nor a .zip file{advice_for(path)}")

    with reading(path, " as a zip file"):
        archive = zipfile.ZipFile(path)
    with archive:
        yield _zip(path, archive)


def _folder(path: Path) -> Files:
    """List the files of a folder."""
    stored = _by_name(path, [(name, name) for name in _folder_names(path)])

    def stamp(name: str) -> tuple[int, int]:
        try:
            status = (path / stored[name]).stat()
        except OSError:  # A link to nowhere. Reading it will say so.
            return 0, 0
        return status.st_size, status.st_mtime_ns

    return _files(path, list(stored), lambda name: (path / stored[name]).open("rb"), stamp)


def _zip(path: Path, archive: zipfile.ZipFile) -> Files:
    """List the files of a zip."""
    entry = _by_name(path, [(entry.filename, entry) for entry in archive.infolist()])

    def stamp(name: str) -> tuple[int, int]:
        return entry[name].file_size, entry[name].CRC

    return _files(path, list(entry), lambda name: archive.open(entry[name]), stamp)


def _by_name(path: Path, entries: list[tuple[str, T]]) -> dict[str, T]:
    """Map the names of files to their entries; one of two files of a name would be lost without a word."""
    places: dict[str, T] = {}
    for stored_name, entry in entries:
        name = with_slashes(stored_name)
        if name in places and not name.endswith("/"):
            raise InputError(f"{path} holds two files of the name {printable(name)}")
        places[name] = entry
    return places


def _files(path: Path, names: list[str], open_: Callable[[str], IO[bytes]], stamp: Stamp) -> Files:
    """Choose the images among all files, and say how many are left out."""
    images, left_out = choose_images(names, open_)
    if not images:
        raise InputError(nothing_read(path, names, left_out))
    if left_out:
        say(f"{path}: {left_out_line(images, left_out)}")

    def read(name: str) -> bytes:
        with open_(name) as file:
            return file.read()

    return Files(path, names, images, read, stamp)


def _folder_names(path: Path) -> list[str]:
    """List the files and folders below a folder, also behind links."""

    def refuse(error: OSError) -> None:
        raise error  # Otherwise `os.walk` leaves out folders that cannot be read.

    names = []
    for folder, subfolders, files in os.walk(path, onerror=refuse, followlinks=True):
        # The images of such a link would count many times.
        if Path(folder).resolve() in Path(os.path.abspath(folder)).parents:
            raise InputError(f"{printable(folder)} is a link to a folder above it")
        here = Path(folder).relative_to(path)
        names += [(here / name).as_posix() for name in files]
        names += [(here / name).as_posix() + "/" for name in subfolders]
    return names
