"""Folders and zips of files: what is in them, and how it is read."""

import functools
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np

from lit_knn.common.errors import InputError, printable
from lit_knn.data.file_names import (
    IMAGE_SUFFIXES,
    choose_images,
    is_hidden,
    left_out_line,
    nothing_read,
)

T = TypeVar("T")

# (name) -> the size of a file, and its time of change in a folder or its checksum in a zip, without reading the file.
Stamp = Callable[[str], tuple[int, int]]


class ImageLabels(NamedTuple):
    """The labels of images, if they have any."""

    numbers: np.ndarray | None = None  # (N,) int64
    class_names: list[str] | None = None  # of the classes 0, 1, …
    problem: str = ""  # why the labels of a file are left out


class Files(NamedTuple):
    """The image files of a folder, a zip, or another store of encoded images."""

    path: Path
    # Names are relative to the root. Those of folders end with a slash.
    names: list[str]  # of files and folders
    images: list[str]  # of the image files that are read, sorted, without hidden ones
    read: Callable[[str], bytes]  # (name) -> content of a file
    stamp: Stamp
    labels: ImageLabels | None = None  # of a store that has labels beside its images
    label_advice: str = ""  # how such a store gets labels


# The cache drops a repeated line, because a run opens its data twice.
@functools.cache
def say(text: str) -> None:
    """Print a line about the data on the first rank, unless this process has printed it before."""
    # Lightning knows the rank even before the ranks connect. Without Lightning, as in `lit-knn prepare`, there is only
    # one process.
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


def folder_files(path: Path) -> Files:
    """List the files of a folder."""
    # A name on the disk may hold a backslash, which `with_slashes` replaces.
    names_on_disk = _folder_names(path)
    on_disk = by_name(path, names_on_disk, names_on_disk)

    def open_(name: str) -> IO[bytes]:
        return (path / on_disk[name]).open("rb")

    def stamp(name: str) -> tuple[int, int]:
        try:
            status = (path / on_disk[name]).stat()
        except OSError:
            # The file is a link to nowhere. The error comes when it is read.
            return 0, 0
        return status.st_size, status.st_mtime_ns

    return image_files(path, list(on_disk), open_, stamp)


def zip_files(path: Path, archive: zipfile.ZipFile) -> Files:
    """List the files of a zip."""
    entries = archive.infolist()
    entry = by_name(path, [each.filename for each in entries], entries)

    def open_(name: str) -> IO[bytes]:
        return archive.open(entry[name])

    def stamp(name: str) -> tuple[int, int]:
        return entry[name].file_size, entry[name].CRC

    return image_files(path, list(entry), open_, stamp)


def by_name(path: Path, stored_names: list[str], entries: list[T]) -> dict[str, T]:
    """Map the name of each file or folder, as `with_slashes` gives it, to its entry.

    Raises InputError if two files have one name, because one of them would be lost without a word.

    Args:
        path: the folder, zip or tar.
        stored_names: names as they are stored.
        entries: what is needed to open each of them.
    """
    places: dict[str, T] = {}
    for stored_name, entry in zip(stored_names, entries, strict=True):
        name = with_slashes(stored_name)
        if name in places and not name.endswith("/"):
            raise InputError(f"{path} holds two files of the name {printable(name)}")
        places[name] = entry
    return places


def image_files(
    path: Path, names: list[str], open_: Callable[[str], IO[bytes]], stamp: Stamp
) -> Files:
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


def holds_images(folder: Path) -> bool:
    """Return whether image files that are not hidden lie in a folder, or below it. A file is no folder."""
    for place, _, names in os.walk(folder, followlinks=True):
        here = Path(place).relative_to(folder)
        for name in names:
            if name.lower().endswith(IMAGE_SUFFIXES) and not is_hidden((here / name).as_posix()):
                return True
    return False


def _folder_names(path: Path) -> list[str]:
    """List the files and folders below a folder and below the links in it. Names of folders end with a slash."""

    def refuse(error: OSError) -> None:
        raise error  # Otherwise `os.walk` leaves out folders that cannot be read.

    names = []
    for folder, subfolders, files in os.walk(path, onerror=refuse, followlinks=True):
        # A link to a folder above it would list the same images again and again.
        if Path(folder).resolve() in Path(os.path.abspath(folder)).parents:
            raise InputError(f"{printable(folder)} is a link to a folder above it")
        here = Path(folder).relative_to(path)
        names += [(here / name).as_posix() for name in files]
        names += [(here / name).as_posix() + "/" for name in subfolders]
    return names
