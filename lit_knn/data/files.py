"""Folders and zips of files: what is in them, and how it is read."""

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lit_knn.common.errors import InputError, first_line, printable

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")

# (name) -> size of a file, and its time of change or CRC; it needs no reading.
Stamp = Callable[[str], tuple[int, int]]


class Files(NamedTuple):
    """The files of a folder or zip."""

    path: Path
    names: list[str]  # files and folders, relative to its root; the name of a folder ends with a slash
    images: list[str]  # names of the PNG and JPEG files, sorted, without hidden ones
    read: Callable[[str], bytes]  # (name) -> content of a file
    stamp: Stamp


@contextmanager
def reading(what: object, kind: str = "", advice: str = "") -> Iterator[None]:
    """Turn any error of the block into an InputError about the file `what`: damaged files raise errors of many types.

    `kind` is what it is read as, such as " as an image", and `advice` what the user can do.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what} cannot be read{kind}: {first_line(error):.300}{advice}") from error


def existing(path: str | os.PathLike[str]) -> Path:
    """Return the path of data; raise InputError if it does not exist."""
    if not os.fspath(path):
        raise InputError("the path of the data is empty")
    path = Path(path).expanduser()
    if not path.exists():
        raise InputError(f"{printable(str(path))} does not exist")
    return path


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Files]:
    """Open a folder or zip of images."""
    path = existing(path)
    if path.is_dir():

        def stamp(name: str) -> tuple[int, int]:
            status = (path / name).stat()
            return status.st_size, status.st_mtime_ns

        yield _files(path, _folder_names(path), lambda name: (path / name).read_bytes(), stamp)
        return
    if path.suffix.lower() != ".zip":
        raise InputError(f"{path} is neither a folder nor a .zip file")
    with reading(path, " as a zip file"):
        archive = zipfile.ZipFile(path)
    with archive:
        found: dict[str, zipfile.ZipInfo] = {}
        for entry in archive.infolist():
            name = entry.filename.removeprefix("./")  # Some programs put this before each name.
            if name in found and not entry.is_dir():
                raise InputError(f"{archive.filename} holds two files of the name {printable(name)}")
            found[name] = entry

        def read(name: str) -> bytes:
            return archive.read(found[name])

        yield _files(path, list(found), read, lambda name: (found[name].file_size, found[name].CRC))


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder is not part of the data: `.thumbnails/0.png`, and what macOS adds to its zips."""
    return name.startswith("__MACOSX/") or any(part.startswith(".") and part.strip(".") for part in name.split("/"))


def _files(path: Path, names: list[str], read: Callable[[str], bytes], stamp: Stamp) -> Files:
    images = sorted(name for name in names if name.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(name))
    if not images:
        raise InputError(f"{path} holds no image files ({', '.join(IMAGE_SUFFIXES)})")
    return Files(path, names, images, read, stamp)


def _folder_names(path: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise error  # Otherwise `os.walk` leaves out folders that cannot be read.

    names = []
    for folder, subfolders, files in os.walk(path, onerror=refuse, followlinks=True):
        if Path(folder).resolve() in Path(os.path.abspath(folder)).parents:  # Its images would count many times.
            raise InputError(f"{printable(folder)} is a link to a folder above it")
        here = Path(folder).relative_to(path)
        names += [(here / name).as_posix() for name in files]
        names += [(here / name).as_posix() + "/" for name in subfolders]
    return names
