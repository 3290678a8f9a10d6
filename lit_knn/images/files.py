"""Read image data from disk into arrays: zips and folders of image files, `.npy` and `.npz`."""

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lit_knn.errors import InputError, first_line

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
LABEL_FILE = "dataset.json"
# Pillow and zipfile raise these exceptions on damaged data, besides their own exceptions.
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, RuntimeError, zlib.error, struct.error, zipfile.BadZipFile)

Read = Callable[[str], bytes]


def read_image_files(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray | None]:
    """Read a zip or a folder in the layout of EDM's data sets.

    Every PNG and JPEG file, in subfolders too, is one image. Images are sorted by name. Hidden and other files are
    ignored. `dataset.json` at the root may hold the labels, exactly one for each image:
    {"labels": [["00000/img00000.png", 6], ...]} or {"labels": null}.

    Args:
        path: a .zip file or a folder.

    Returns:
        `images` (N, C, H, W), uint8, C = 3 for colour (a palette becomes its colours) or 1 for grayscale, and
        `labels` (N,), int64, or None.

    Raises:
        InputError: a path that does not exist; no images; an image that is damaged, that differs from the first in
            size or number of channels, or that is neither RGB, palette nor 8-bit grayscale; labels that do not match.
    """
    path = existing(path)
    with opened(path) as (names, read):
        image_names = sorted_images(path, names)
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


def read_array_file(path: str | os.PathLike[str], floats_as_is: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
    """Read images, latents or vectors from one NumPy file.

    uint8 arrays are images of 1 or 3 channels, (N, C, H, W). An array (N, H, W, C) is moved to this layout if its last
    axis is 1 or 3 long and axis 1 is not. Floats (N, *shape) become float32, and are never rescaled or rearranged.

    Args:
        path: an .npy file; or an .npz file with the array under `images`, `arr_0` or, for a single array, any name,
            and optionally `labels`, (N,) integers.
        floats_as_is: also accept floats that look like images by mistake: 4-D with 1 or 3 channels, and with values
            outside [-1, 1] or with the channels last.

    Returns:
        `array` (N, *shape), uint8 or float32, and `labels` (N,), int64, or None.

    Raises:
        InputError: a path that does not exist, a damaged file, pickled objects, no usable key, another dtype or shape,
            floats that are not finite or look like images by mistake, labels that do not match.
    """
    path = existing(path)
    array, labels = _load_arrays(path)
    if array.ndim < 2 or 0 in array.shape:
        raise InputError(f"{path}: the array must be (N, *shape) and not empty, got shape {array.shape}")
    if array.dtype == np.uint8:
        array = _channels_first(path, array)
    elif np.issubdtype(array.dtype, np.floating):
        array = _checked_floats(path, array, floats_as_is)
    else:
        raise InputError(f"{path}: the array must be uint8 or float, got {array.dtype}")
    return array, None if labels is None else _checked_labels(path, labels, len(array))


def array_file_shape(path: str | os.PathLike[str]) -> tuple[tuple[int, ...], int]:
    """Return the shape that `read_array_file` gives for an .npy file, and the bytes of each value, without reading any.

    Raises:
        InputError: a path that does not exist, or a damaged file.
    """
    path = existing(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        raise InputError(f"{path} cannot be read as NumPy arrays: {first_line(error)}") from error
    if array.dtype != np.uint8:
        return array.shape, 4
    channels_last = array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3)
    return np.moveaxis(array, 3, 1).shape if channels_last else array.shape, 1


def existing(path: str | os.PathLike[str]) -> Path:
    """Return the path of data; raise InputError if it does not exist."""
    if not os.fspath(path):
        raise InputError("the path of the data is empty")
    path = Path(path).expanduser()
    if not path.exists():
        raise InputError(f"{path} does not exist")
    return path


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
        yield _folder_names(path), lambda name: (path / name).read_bytes()
    elif path.suffix.lower() == ".zip":
        try:
            archive = zipfile.ZipFile(path)
        except DAMAGED as error:
            raise InputError(f"{path} is not a readable zip file: {first_line(error)}") from error
        with archive:
            yield sorted({entry.filename for entry in archive.infolist() if not entry.is_dir()}), archive.read
    else:
        raise InputError(f"{path} is neither a folder nor a .zip file")


def _folder_names(path: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    walk = os.walk(path, onerror=refuse)
    return [(Path(folder) / file).relative_to(path).as_posix() for folder, _, files in walk for file in files]


def _read_images(path: Path, names: list[str], read: Read) -> np.ndarray:
    from tqdm import tqdm

    first = decode(path, names[0], read)
    images = np.empty((len(names), *first.shape), np.uint8)
    for i, name in enumerate(tqdm(names, desc=f"Reading {path.name}", unit=" images", disable=None, leave=False)):
        image = decode(path, name, read)
        if image.shape != first.shape:
            raise InputError(
                f"{path}: all images must have one size and number of channels, but {names[0]} is "
                f"{describe_size(first)} and {name} is {describe_size(image)}"
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

    try:
        with Image.open(io.BytesIO(read(name))) as image:
            opaque_palette = image.mode == "P" and "transparency" not in image.info
            changed = change(image.convert("RGB") if opaque_palette else image)
            mode = changed.mode
            pixels = np.asarray(changed)
    except InputError:
        raise
    except UnidentifiedImageError as error:
        raise InputError(f"{path}: {name} is not an image") from error
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: {name} cannot be read as an image: {first_line(error)}") from error
    if mode not in ("RGB", "L"):
        kind = "palette with transparency" if mode == "P" else mode
        raise InputError(f"{path}: {name} has mode {kind}; only RGB, palette and 8-bit grayscale (L) images are read")
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
            raise InputError(f"{path}: {LABEL_FILE} must be at the root, found {elsewhere[0]}")
        return None
    where = f"{path}: {LABEL_FILE}"
    try:
        content = json.loads(read(LABEL_FILE))
    except DAMAGED as error:
        raise InputError(f"{where} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict) or "labels" not in content:
        raise InputError(f'{where} must be an object with the key "labels"')
    if content["labels"] is None:
        return None
    label_of = _labels_by_name(where, content["labels"])
    for name in image_names:
        if name not in label_of:
            raise InputError(f"{where} has {len(label_of)} labels for {len(image_names)} images, none for {name}")
    if len(label_of) > len(image_names):
        known = set(image_names)
        unknown = next(name for name in label_of if name not in known)
        raise InputError(
            f"{where} has {len(label_of)} labels for {len(image_names)} images; {unknown} is not among the images"
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
            raise InputError(f"{where}: the label of {name} must be an integer from 0, got {label!r:.80}")
        if name in label_of:
            raise InputError(f"{where} names {name} twice")
        label_of[name] = label
    return label_of


def _load_arrays(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    if path.suffix.lower() not in (".npy", ".npz"):
        raise InputError(f"{path} is neither an .npy nor an .npz file")
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content, None
        with content:
            key = _array_key(path, content.files)
            return content[key], content["labels"] if "labels" in content.files else None
    except InputError:
        raise
    except DAMAGED as error:
        reason = "it holds pickled objects or is damaged" if "allow_pickle" in str(error) else first_line(error)
        raise InputError(f"{path} cannot be read as NumPy arrays: {reason}") from error


def _array_key(path: Path, keys: list[str]) -> str:
    others = [key for key in keys if key != "labels"]
    for key in ("images", "arr_0"):
        if key in others:
            return key
    if len(others) != 1:
        found = ", ".join(keys) or "nothing"
        raise InputError(f"{path} must hold the array under the key images, arr_0 or as the only array, found: {found}")
    return others[0]


def _channels_first(path: Path, array: np.ndarray) -> np.ndarray:
    if array.ndim == 4 and array.shape[1] in (1, 3):
        return array
    if array.ndim == 4 and array.shape[3] in (1, 3):
        return np.ascontiguousarray(np.moveaxis(array, 3, 1))
    raise InputError(f"{path}: uint8 images must be (N, C, H, W) with 1 or 3 channels, got shape {array.shape}")


def _checked_floats(path: Path, array: np.ndarray, as_is: bool) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, np.float32)
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        row = next(i for i, item in enumerate(array) if not np.isfinite(item).all())
        raise InputError(f"{path}: the array holds a value that is not a finite float32 (first in item {row})")
    if as_is or array.ndim != 4:
        return array
    if array.shape[1] in (1, 3):
        if low < -1 or high > 1:
            raise InputError(
                f"{path}: float images with values from {low:g} to {high:g}; floats are never rescaled: give uint8, "
                "or floats in [-1, 1], or set floats_as_is if these values are meant"
            )
    elif array.shape[3] in (1, 3):
        raise InputError(
            f"{path}: float array of shape {array.shape} looks like images with the channels last; floats are never "
            "rearranged: give (N, C, H, W), or set floats_as_is if this shape is meant"
        )
    return array


def _checked_labels(path: Path, labels: np.ndarray, N: int) -> np.ndarray:
    if labels.shape != (N,) or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            f"{path}: labels must be {N} integers, one for each image, got {labels.dtype} of shape {labels.shape}"
        )
    if labels.min() < 0 or labels.max() >= 2**31:
        bad = labels[(labels < 0) | (labels >= 2**31)][0]
        raise InputError(f"{path}: labels must be from 0 to {2**31 - 1}, got {bad}")
    return labels.astype(np.int64)
