"""Prepared images, written by `lit-knn prepare`: a memory-mapped `.npy` file, and a `.json` that describes it."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lit_knn.common.errors import InputError, reading
from lit_knn.data.array_tensors import as_tensor

if TYPE_CHECKING:  # Preparing needs no torch, which takes seconds to load.
    from torch import Tensor

PARTIAL_SUFFIX = ".partial"
# The types of the values of images, and of latents.
PIXELS, FLOATS = (np.uint8,), (np.float16, np.float32)
# End of the messages about a file that does not fit its description.
AGAIN = ": if lit-knn prepare made both files, delete them and prepare again; --data Arrays reads other arrays"


class Description(NamedTuple):
    """The content of the `.json` file."""

    shape: tuple[
        int, ...
    ]  # (N, C, H, W), or (2N, C, H, W) of latents with those of mirrored images
    sha256: str  # hash of the pixels, 64 hexadecimal digits
    origin: Mapping[str, object]  # the source of the images and the options
    labels: list[int] | None  # one for each image
    class_names: list[str] | None = None  # of the classes 0, 1, …
    # how the latents in the file were made, see `lit_knn.data.latents_writer.Encoding`; None if it has images
    latents: Mapping[str, object] | None = None


class PreparedImages(NamedTuple):
    """Prepared images that are open for reading."""

    # (N, C, H, W), uint8, read-only, memory-mapped: a machine's processes share the pages
    images: "Tensor"
    labels: np.ndarray | None  # (N,), int64, in memory
    sha256: str  # hash of the pixels
    class_names: list[str] | None  # of the classes 0, 1, …


def is_prepared(path: Path) -> bool:
    """Return whether `lit-knn prepare` wrote this file: an .npy file with a .json beside it."""
    return path.suffix.lower() == ".npy" and path.with_suffix(".json").is_file()


def npy_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of prepared images; raise InputError if it does not end in .npy."""
    path = Path(path).expanduser()
    if path.suffix.lower() != ".npy":
        raise InputError(f"{path} must end in .npy, as the files of lit-knn prepare do")
    return path


def skipped_path(out: Path) -> Path:
    """Return the path of the text file that names the bad files that `--skip-bad` left out."""
    return out.with_suffix(".skipped.txt")


def read_prepared(path: str | os.PathLike[str]) -> PreparedImages:
    """Open prepared images. They stay on the disk, and no pixel is read yet."""
    path = Path(path).expanduser()
    if path.suffix.lower() != ".npy" and path.exists():
        kind = "--data Arrays" if path.suffix.lower() == ".npz" else "--data ImageFiles"
        raise InputError(f"{path} is no file of lit-knn prepare: read it with {kind}")

    path = npy_path(path)
    pixels, description = open_prepared(path)
    if description.latents is not None:
        raise InputError(f"{path} holds latents, not images: read it with --data Images")
    labels = None if description.labels is None else np.array(description.labels)
    return PreparedImages(as_tensor(pixels), labels, description.sha256, description.class_names)


def verify(path: str | os.PathLike[str]) -> Description:
    """Read all pixels of prepared images, check their hash against that in the `.json`, and return its content."""
    path = npy_path(path)
    pixels, description = open_prepared(path)
    with path.open("rb") as file:
        file.seek(pixels.offset)
        if hashlib.file_digest(file, "sha256").hexdigest() != description.sha256:
            raise InputError(f"{path} is damaged: its pixels are not what was prepared{AGAIN}")
    return description


def open_prepared(path: Path) -> tuple[np.memmap, Description]:
    """Map the pixels of prepared images, read their description, and check that the two fit, without reading pixels."""
    if not path.is_file():
        if path.with_name(path.name + PARTIAL_SUFFIX).exists():
            raise InputError(f"{path} is not finished: run its lit-knn prepare again")
        raise InputError(f"{path} is no file: make one with lit-knn prepare")

    with reading(path, advice=AGAIN):
        pixels = np.lib.format.open_memmap(path, mode="r")
    description = read_description(path)

    types = PIXELS if description.latents is None else FLOATS
    fits = pixels.dtype in types and pixels.shape == description.shape and pixels.ndim == 4
    if not fits or not pixels.flags.c_contiguous:
        raise InputError(f"{path} is not what {path.with_suffix('.json').name} says{AGAIN}")
    return pixels, description


def read_description(path: Path) -> Description:
    """Read the `.json` beside a prepared file."""
    beside = path.with_suffix(".json")
    with reading(beside, advice=AGAIN):
        fields = json.loads(beside.read_text(encoding="utf-8"))
        return Description(**{**fields, "shape": tuple(fields["shape"])})
