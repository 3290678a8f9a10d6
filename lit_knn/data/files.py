"""Opens folders and zips of files, so that no pipe blocks and no file takes all memory."""

import lzma
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lit_knn.common.errors import InputError, first_line, printable
from lit_knn.common.memory import machine_bytes

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
# Pillow, zipfile and NumPy raise these exceptions on damaged data, besides their own exceptions.
DAMAGED: tuple[type[Exception], ...] = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError, MemoryError, OverflowError, LookupError, TypeError),
    *(zlib.error, struct.error, lzma.LZMAError, zipfile.BadZipFile, tokenize.TokenError),
)
# A small zip may promise files of any size. No image or list of labels of a real data set is larger.
MAX_FILE_BYTES = 2**28
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)


class Files(NamedTuple):
    """The files of a folder or zip.

    Attributes:
        path: the folder or zip.
        names: files and folders, relative to its root; the name of a folder ends with a slash.
        images: names of the PNG and JPEG files, sorted, without hidden ones.
        read: (name) -> content of a file.
        stamp: (name) -> size and time of change or CRC of a file, which need no reading.
    """

    path: Path
    names: list[str]
    images: list[str]
    read: Callable[[str], bytes]
    stamp: Callable[[str], str]


def existing(path: str | os.PathLike[str]) -> Path:
    """Return the path of data; raise InputError if it does not exist."""
    if not os.fspath(path):
        raise InputError("the path of the data is empty")
    path = Path(path).expanduser()
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{printable(str(path))} cannot be read: {first_line(error):.300}") from error
    # Opening a pipe would wait for somebody to write to it.
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise InputError(f"{path} is neither a file nor a folder, but a pipe, a socket or a device")
    return path


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Files]:
    """Open a folder or zip of images.

    Raises:
        InputError: a path that does not exist or is neither; a folder that cannot be read; no images.
    """
    path = existing(path)
    if path.is_dir():
        yield _files(
            path, _folder_names(path), lambda name: _read_regular(path / name), lambda name: _stamp(path / name)
        )
    elif path.suffix.lower() == ".zip":
        try:
            archive = zipfile.ZipFile(path)
        except DAMAGED as error:
            raise InputError(f"{path} is not a readable zip file: {first_line(error):.300}") from error
        with archive:
            names = sorted({name for name in archive.namelist() if name})
            yield _files(path, names, lambda name: _read_entry(archive, name), lambda name: _crc(archive.getinfo(name)))
    else:
        raise InputError(f"{path} is neither a folder nor a .zip file")


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder is not part of the data: `.thumbnails/0.png`, and what macOS adds to its zips."""
    return name.startswith("__MACOSX/") or any(part.startswith(".") for part in name.split("/"))


def _files(path: Path, names: list[str], read: Callable[[str], bytes], stamp: Callable[[str], str]) -> Files:
    images = sorted(name for name in names if name.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(name))
    if not images:
        raise InputError(f"{path} holds no image files ({', '.join(IMAGE_SUFFIXES)})")
    return Files(path, names, images, read, stamp)


def _folder_names(path: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    names = []
    for folder, subfolders, files in os.walk(path, onerror=refuse, followlinks=True):
        links = (link for name in subfolders if (link := Path(folder, name)).is_symlink())
        loop = next((link for link in links if Path(folder).resolve().is_relative_to(link.resolve())), None)
        if loop is not None:
            raise InputError(f"{printable(str(loop))} links to a folder that it is in")
        here = Path(folder).relative_to(path)
        names += [(here / name).as_posix() for name in files]
        names += [(here / name).as_posix() + "/" for name in subfolders]
    return names


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}\t{status.st_mtime_ns}"


def _crc(entry: zipfile.ZipInfo) -> str:
    return f"{entry.file_size}\t{entry.CRC}"


def _read_regular(path: Path) -> bytes:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{printable(str(path))} is no regular file, but a pipe, a socket or a device")
    _check_size(printable(str(path)), status.st_size)
    return path.read_bytes()


def _read_entry(archive: zipfile.ZipFile, name: str) -> bytes:
    entry = archive.getinfo(name)
    check_entry(archive, entry)
    _check_size(f"{archive.filename}: {printable(name)}", entry.file_size)
    return archive.read(name)


def check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Raise BadZipFile if reading an entry of a zip would take memory that has nothing to do with its size."""
    if entry.header_offset + entry.compress_size > archive.start_dir:
        raise zipfile.BadZipFile("it is longer than the zip")
    # LZMA states the size of its dictionary.
    if entry.compress_type not in COMPRESSIONS:
        raise zipfile.BadZipFile(f"compression {entry.compress_type} is not read, only deflate and bzip2")


def _check_size(where: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise InputError(f"{where} has {size:,} bytes, an image or a list of labels at most {MAX_FILE_BYTES:,}")


def check_memory(path: Path, needed: int, what: str) -> None:
    """Refuse data that this machine cannot hold.

    Args:
        path: the file, for the message.
        needed: bytes.
        what: describes the data.

    Raises:
        InputError: `needed` is more than the memory of the machine.
    """
    most = machine_bytes()
    if most is not None and needed > most:
        raise InputError(
            f"{path}: {what} need {needed / 1e9:.1f} GB of memory, this machine has {most / 1e9:.1f} GB; "
            "lit-knn prepare makes a file that is read by page"
        )
