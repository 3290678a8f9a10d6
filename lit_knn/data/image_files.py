"""Read zips and folders of image files from disk into arrays."""

import io
import json
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
from typing import Any

import numpy as np

from lit_knn.common.errors import InputError, first_line, printable
from lit_knn.common.memory import machine_bytes
from lit_knn.data.folder_labels import check_class_folders, folder_labels

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
LABEL_FILE = "dataset.json"
# Pillow, zipfile and NumPy raise these exceptions on damaged data, besides their own exceptions.
DAMAGED: tuple[type[Exception], ...] = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError, MemoryError, OverflowError, LookupError, TypeError),
    *(zlib.error, struct.error, lzma.LZMAError, zipfile.BadZipFile, tokenize.TokenError),
)
# A small zip may promise files of any size. No image or list of labels of a real data set is larger than these limits.
MAX_FILE_BYTES, MAX_PIXELS = 2**28, 2**27
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)

Read = Callable[[str], bytes]


def read_image_files(
    path: str | os.PathLike[str], labels_from_folders: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """Read a zip or a folder in the layout of EDM's data sets.

    Every PNG and JPEG file, in subfolders too, is one image. Images are sorted by name. Hidden and other files are
    ignored. `dataset.json` at the root may hold the labels, exactly one for each image:
    {"labels": [["00000/img00000.png", 6], ...]} or {"labels": null}.

    Args:
        path: a .zip file or a folder.
        labels_from_folders: number the folders of the images by name, see `folder_labels`; `dataset.json` is not read.

    Returns:
        `images` (N, C, H, W), uint8, C = 3 for colour (a palette becomes its colours) or 1 for grayscale, and
        `labels` (N,), int64, or None.

    Raises:
        InputError: a path that does not exist; no images; an image that is damaged, that differs from the first in
            size or number of channels, or that is neither RGB, palette nor 8-bit grayscale; labels that do not match,
            or folders that are no classes.
    """
    path = existing(path)
    with opened(path) as (names, read):
        image_names = sorted_images(path, names)
        if labels_from_folders:
            check_class_folders(path, image_names)
            labels: np.ndarray | None = folder_labels(path, image_names)
        else:
            labels = read_labels(path, names, image_names, read)
        return _read_images(path, image_names, read), labels


def count_image_files(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the shape (N, C, H, W) of `read_image_files`; this reads only the file names and the first image.

    Raises:
        InputError: a path that does not exist, no images, or a first image that cannot be read.
    """
    path = existing(path)
    with opened(path) as (names, read):
        image_names = sorted_images(path, names)
        return len(image_names), *decode(path, image_names[0], read).shape


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


def sorted_images(path: Path, names: list[str]) -> list[str]:
    """Return the names of images, sorted; raise InputError if there are none."""
    image_names = sorted(name for name in names if _is_image(name))
    if not image_names:
        raise InputError(f"{path} holds no image files ({', '.join(IMAGE_SUFFIXES)})")
    return image_names


def _is_image(name: str) -> bool:
    # macOS adds files such as __MACOSX/._0.png to its zips; they are not images.
    hidden = name.startswith("__MACOSX/") or any(part.startswith(".") for part in name.split("/"))
    return name.lower().endswith(IMAGE_SUFFIXES) and not hidden


@contextmanager
def opened(path: Path) -> Iterator[tuple[list[str], Read]]:
    """Open a folder or zip: yield the names in it, relative to its root, and a function that reads one of them."""
    if path.is_dir():
        yield _folder_names(path), lambda name: _read_regular(path / name)
    elif path.suffix.lower() == ".zip":
        try:
            archive = zipfile.ZipFile(path)
        except DAMAGED as error:
            raise InputError(f"{path} is not a readable zip file: {first_line(error):.300}") from error
        with archive:
            # `is_dir` fails for an entry without a name.
            names = sorted({e.filename for e in archive.infolist() if e.filename and not e.is_dir()})
            yield names, lambda name: _read_entry(archive, name)
    else:
        raise InputError(f"{path} is neither a folder nor a .zip file")


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
        raise InputError(f"{where} has {size:,} bytes, an image or {LABEL_FILE} at most {MAX_FILE_BYTES:,}")


def _folder_names(path: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    names = []
    for folder, subfolders, files in os.walk(path, onerror=refuse, followlinks=True):
        links = (link for name in subfolders if (link := Path(folder, name)).is_symlink())
        loop = next((link for link in links if Path(folder).resolve().is_relative_to(link.resolve())), None)
        if loop is not None:
            raise InputError(f"{printable(str(loop))} links to a folder that it is in")
        names += [Path(folder, file).relative_to(path).as_posix() for file in files]
    return names


def _read_images(path: Path, names: list[str], read: Read) -> np.ndarray:
    from tqdm import tqdm

    first = decode(path, names[0], read)
    check_memory(path, len(names) * first.size, f"{len(names):,} images of {describe_size(first)}")
    images = np.empty((len(names), *first.shape), np.uint8)
    for i, name in enumerate(tqdm(names, desc=f"Reading {path.name}", unit=" images", disable=None, leave=False)):
        image = decode(path, name, read)
        if image.shape != first.shape:
            raise InputError(
                f"{path}: all images must have one size and number of channels, but {printable(names[0])} is "
                f"{describe_size(first)} and {printable(name)} is {describe_size(image)}; `lit-knn prepare --size S` "
                "makes them one size"
            )
        images[i] = image
    return images


def decode(path: Path, name: str, read: Read, change: Callable[[Any], Any] = lambda image: image) -> np.ndarray:
    """Decode the image `name` of `path` to (C, H, W), uint8; `read` returns the bytes stored under a name.

    `change` changes the `PIL.Image` before its pixels are taken; an opaque palette is then already RGB.

    Raises:
        InputError: a file that is not an image, a damaged image, or an unsupported mode.
    """
    from PIL import Image, UnidentifiedImageError

    where = f"{path}: {printable(name)}"
    try:
        # Other formats have readers that need far more memory, or that start other programs.
        with Image.open(io.BytesIO(read(name)), formats=("PNG", "JPEG")) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InputError(f"{where} is {width}x{height}, which is more than {MAX_PIXELS:,} pixels")
            opaque_palette = image.mode == "P" and "transparency" not in image.info
            changed = change(image.convert("RGB") if opaque_palette else image)
            mode = changed.mode
            pixels = np.asarray(changed)
    except InputError:
        raise
    except UnidentifiedImageError as error:
        raise InputError(f"{where} is not an image, as PNG or JPEG") from error
    except Image.DecompressionBombError as error:
        raise InputError(f"{where} has too many pixels: {first_line(error):.300}") from error
    except DAMAGED as error:
        raise InputError(f"{where} cannot be read as an image: {first_line(error):.300}") from error
    if mode not in ("RGB", "L"):
        kind = "palette with transparency" if mode == "P" else mode
        raise InputError(f"{where} has mode {kind}; only RGB, palette and 8-bit grayscale (L) images are read")
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def describe_size(image: np.ndarray) -> str:
    """Describe an image (C, H, W) in words: width, height and channels."""
    channels, height, width = image.shape
    return f"{width}x{height} with {channels} channel{'s' if channels > 1 else ''}"


def read_labels(path: Path, names: list[str], image_names: list[str], read: Read) -> np.ndarray | None:
    """Read the labels in `dataset.json`, (N,) int64 in the order of `image_names`, or None as in `read_image_files`."""
    if LABEL_FILE not in names:
        elsewhere = [name for name in names if name.endswith(f"/{LABEL_FILE}")]
        if elsewhere:
            raise InputError(f"{path}: {LABEL_FILE} must be at the root, found {printable(elsewhere[0])}")
        return None
    where = f"{path}: {LABEL_FILE}"
    try:
        content = json.loads(read(LABEL_FILE))
    except InputError:
        raise
    except DAMAGED as error:
        raise InputError(f"{where} cannot be read: {first_line(error):.300}") from error
    if not isinstance(content, dict) or "labels" not in content:
        raise InputError(f'{where} must be an object with the key "labels"')
    if content["labels"] is None:
        return None
    label_of = _labels_by_name(where, content["labels"])
    for name in image_names:
        if name not in label_of:
            raise InputError(
                f"{where} has {len(label_of)} labels for {len(image_names)} images, none for {printable(name)}"
            )
    if len(label_of) > len(image_names):
        known = set(image_names)
        unknown = next(name for name in label_of if name not in known)
        raise InputError(
            f"{where} has {len(label_of)} labels for {len(image_names)} images; "
            f"{printable(unknown)} is not among the images"
        )
    return np.array([label_of[name] for name in image_names], np.int64)


def _labels_by_name(where: str, entries: Any) -> dict[str, int]:
    if not isinstance(entries, list):
        raise InputError(f'{where}: "labels" must be null or a list of [file name, label] pairs')
    label_of: dict[str, int] = {}
    for i, entry in enumerate(entries):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise InputError(f"{where}: entry {i} of labels must be a [file name, label] pair, got {entry!r:.80}")
        name, label = entry
        if type(label) is not int or not 0 <= label < 2**31:
            raise InputError(f"{where}: the label of {printable(name)} must be an integer from 0, got {label!r:.80}")
        if name in label_of:
            raise InputError(f"{where} names {printable(name)} twice")
        label_of[name] = label
    return label_of
