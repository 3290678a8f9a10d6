"""Files of latents that `lit-knn prepare --autoencoder` wrote: what their `.json` says, and how they are read."""

import os
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.data.array_tensors import as_tensor
from lit_knn.data.autoencoders import AutoencoderKL
from lit_knn.data.hugging_face import HUB
from lit_knn.data.prepared import (
    Description,
    is_prepared,
    npy_path,
    open_prepared,
    read_description,
)


class Encoding(TypedDict):
    """How latents were made, under `latents` in their `.json`. Paths are relative to the folder of the `.json`."""

    images: str  # the prepared file of the images
    images_sha256: str  # hash of its pixels
    path: str  # the folder of the autoencoder, or its name on the Hub
    settings: dict[str, object]  # those of the autoencoder, with a hash of its weights
    factor: float  # latents are (y − shift) · factor, where y is what the autoencoder puts out
    shift: float
    mirrored: bool  # whether the latents of the mirrored images follow those of the images
    mean: float  # of all values in the file
    standard_deviation: float


class StoredLatents(NamedTuple):
    """Latents that are open for reading."""

    latents: Tensor  # (N, *latent_shape), float16 or float32, read-only, memory-mapped
    mirrored: Tensor | None  # with those of the mirrored images after them, (2N, *latent_shape)
    description: Description
    encoding: Encoding


def encoding_of(path: str | os.PathLike[str]) -> Encoding | None:
    """Return how the latents in a file were made; None if `lit-knn prepare` wrote no latents there."""
    path = Path(path).expanduser()
    if not is_prepared(path):
        return None
    return cast(Encoding | None, read_description(path).latents)


def read_stored_latents(path: str | os.PathLike[str]) -> StoredLatents:
    """Open prepared latents. They stay on the disk, and none is read yet."""
    values, description = open_prepared(npy_path(path))
    encoding = cast(Encoding, description.latents)
    everything = as_tensor(values)
    if not encoding["mirrored"]:
        return StoredLatents(everything, None, description, encoding)
    return StoredLatents(everything[: len(everything) // 2], everything, description, encoding)


def images_and_autoencoder(
    path: str | os.PathLike[str], encoding: Encoding
) -> tuple[str, AutoencoderKL]:
    """Return the path of the images of latents, and the autoencoder that decodes them.

    Args:
        path: the file of the latents.
        encoding: what its `.json` says.
    """
    folder = Path(path).expanduser().parent
    settings = encoding["settings"]
    coder = AutoencoderKL(
        seen_from_here(encoding["path"], folder),
        cast(int | None, settings["draw_seed"]),
        cast(float, settings["scale"]),
    )
    images = seen_from_here(encoding["images"], folder)
    if not Path(images).is_file():
        rule = "samples are compared with the images of latents"
        raise InputError(f"{path}: its .json names the images {images}, which do not exist: {rule}")
    return images, coder


def seen_from(path: str, folder: Path) -> str:
    """Return a path relative to a folder. A name on the Hub stays as it is."""
    if path.startswith(HUB):
        return path
    return os.path.relpath(Path(path).expanduser(), folder)


def seen_from_here(path: str, folder: Path) -> str:
    """Return the path that `seen_from` made relative to `folder`, relative to the current folder."""
    if path.startswith(HUB):
        return path
    return os.path.normpath(folder / path)
