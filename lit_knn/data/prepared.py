"""Prepared images: a memory-mapped `.npy` file of pixels, and a `.json` file beside it that describes them.

Use them for data that does not fit into memory or that the ranks of a run share. `lit-knn prepare` writes
them. The `.npy` file is uint8 (N, C, H, W), which every tool reads.
"""

import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lit_knn.common.errors import InputError, first_line
from lit_knn.data.checksums import BLOCK_BYTES, PixelSums, wrong_block

if TYPE_CHECKING:  # Preparing needs no torch, which takes seconds to load.
    from torch import Tensor

PARTIAL_SUFFIX = ".partial"
# The first bytes of files that versions before 0.1 wrote.
OLD_MAGIC = b"lit_knn images\n"
AGAIN = "delete the .npy and the .json, and prepare them again"


class Description(NamedTuple):
    """The content of the `.json` file.

    Attributes:
        shape: (N, C, H, W).
        sha256: hash of the pixels, 64 hexadecimal digits.
        origin: the source of the images and the options; anything that JSON can write.
        labels: one integer for each image, or None.
        crc32: checksum of each MiB of the pixels, see `checksums`; None in files of earlier versions.
    """

    shape: tuple[int, ...]
    sha256: str
    origin: dict[str, Any]
    labels: list[int] | None
    crc32: list[int] | None = None


class PreparedImages(NamedTuple):
    """Prepared images that are open for reading.

    Attributes:
        images: (N, C, H, W), uint8, read-only. It is memory-mapped: the system reads a page when it is used, and the
            processes of a machine share the pages.
        labels: (N,), int64, in memory, or None.
        sha256: hash of the pixels.
        check_file: raises InputError if the file has become shorter. Reading pixels that are gone ends the process.
    """

    images: "Tensor"
    labels: np.ndarray | None
    sha256: str
    check_file: Callable[[], None]


def npy_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of prepared images; raise InputError if it does not end in .npy."""
    path = Path(path).expanduser()
    if path.suffix != ".npy":
        raise InputError(f"{path} must end in .npy, as the files of lit-knn prepare do")
    return path


def read_description(path: str | os.PathLike[str]) -> Description:
    """Read the description of prepared images, and check that it fits the .npy file, without reading the pixels.

    Raises:
        InputError: a path that does not exist, an unfinished preparation, another kind of file, a missing or damaged
            `.json`, or a file whose length differs from the described one.
    """
    return open_prepared(path)[1]


def read_prepared(path: str | os.PathLike[str]) -> PreparedImages:
    """Open prepared images; they stay on the disk. A few blocks of pixels are compared with their checksums.

    Raises:
        InputError: as `read_description`; a block has other pixels.
    """
    import torch

    path = Path(path).expanduser()
    pixels, description = open_prepared(path)
    if (wrong := wrong_block(path, pixels.offset, description.crc32 or [])) is not None:
        raise _damaged(path, description, wrong)
    labels = None if description.labels is None else np.array(description.labels, np.int64)
    with warnings.catch_warnings():
        # A writable mapping would reserve as much memory as the size of the file.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return PreparedImages(torch.from_numpy(pixels), labels, description.sha256, _length_check(path))


def verify(path: str | os.PathLike[str]) -> Description:
    """Read all pixels of prepared images with a progress bar, and compare them with the hash in the `.json`.

    Raises:
        InputError: as `read_description`; other pixels. The message names the images of the first wrong block.
    """
    from tqdm import tqdm

    path = Path(path).expanduser()
    pixels, description = open_prepared(path)
    found = PixelSums()
    with path.open("rb") as file, tqdm(total=pixels.nbytes, desc="Verifying", unit="B", unit_scale=True) as bar:
        file.seek(pixels.offset)
        while piece := file.read(BLOCK_BYTES):
            found.update(piece)
            bar.update(len(piece))
    then = found.crc32 if description.crc32 is None else description.crc32
    wrong = next(
        (number for number, sums in enumerate(zip(found.crc32, then, strict=True)) if len(set(sums)) > 1), None
    )
    if wrong is not None or found.sha256 != description.sha256:
        raise _damaged(path, description, wrong)
    return description


def _damaged(path: Path, description: Description, block: int | None) -> InputError:
    """Make the error for pixels that are wrong, in a known block or somewhere."""
    image_bytes, last = math.prod(description.shape[1:]), description.shape[0] - 1
    where = "its pixels"
    if block is not None:
        ends = block * BLOCK_BYTES // image_bytes, min(((block + 1) * BLOCK_BYTES - 1) // image_bytes, last)
        where = f"pixels among images {ends[0]} to {ends[1]}"
    return InputError(f"{path} is damaged: {where} are not what was prepared: {AGAIN}")


def _length_check(path: Path) -> Callable[[], None]:
    # The open file stays the mapped one, even if another file gets its name.
    file = path.open("rb")
    length = os.fstat(file.fileno()).st_size

    def check() -> None:
        now = os.fstat(file.fileno()).st_size
        if now < length:
            raise InputError(f"{path} was cut from {length} to {now} bytes while it is in use: {AGAIN}")

    return check


def open_prepared(path: str | os.PathLike[str]) -> tuple[np.memmap, Description]:
    """Map the pixels of prepared images and read their description; raises InputError like `read_description`."""
    path = Path(path).expanduser()
    if not path.is_file():
        unfinished = path.name and path.with_name(path.name + PARTIAL_SUFFIX).exists()
        what, how = ("is not finished: run its", " again") if unfinished else ("is no file: make one with", "")
        raise InputError(f"{path} {what} lit-knn prepare{how}")
    try:
        with path.open("rb") as file:
            if file.read(len(OLD_MAGIC)) == OLD_MAGIC:
                raise InputError(f"{path} has the format of an earlier version: prepare it again, as an .npy file")
        pixels = np.lib.format.open_memmap(npy_path(path), mode="r")
    except InputError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path} is damaged ({first_line(error)}): {AGAIN}") from error
    description = _read_json(path.with_suffix(".json"))
    found, size = (pixels.dtype, pixels.shape, pixels.flags.c_contiguous), path.stat().st_size
    if found != (np.uint8, description.shape, True) or len(description.shape) != 4:
        raise InputError(f"{path} is not what {path.stem}.json says: {AGAIN}")
    if size != pixels.offset + pixels.nbytes:
        raise InputError(f"{path} has {size} bytes instead of {pixels.offset + pixels.nbytes}: {AGAIN}")
    return pixels, description


def _read_json(path: Path) -> Description:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        description = Description(**{**fields, "shape": tuple(fields["shape"])})
        labels = np.array([] if description.labels is None else description.labels)
        blocks = -(-math.prod(description.shape) // BLOCK_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing, which `lit-knn prepare` writes beside the .npy: {AGAIN}") from error
    except (ValueError, TypeError, KeyError, OSError, RecursionError, OverflowError) as error:
        raise InputError(f"{path} is damaged: {AGAIN}") from error
    sums = description.crc32
    if sums is not None and not (isinstance(sums, list) and len(sums) == blocks and all(type(s) is int for s in sums)):
        raise InputError(f"{path} has not one checksum for each block of pixels: {AGAIN}")
    if description.labels is not None and (labels.dtype != np.int64 or labels.shape != description.shape[:1]):
        raise InputError(f"{path} has not one label for each image: {AGAIN}")
    if description.labels and not 0 <= min(description.labels) <= max(description.labels) < 2**31:
        raise InputError(f"{path} has a label outside 0 to {2**31 - 1}: {AGAIN}")
    return description
