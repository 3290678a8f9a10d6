"""Images in one memory-mapped file: the data of a run that does not fit into memory, or is shared by its ranks.

The file is a header of 4096 bytes (a line with its name, then JSON, then spaces), the labels as little-endian int64 if
there are any, filled up to a multiple of 4096 bytes, and the pixels, uint8 (N, C, H, W). `python -m lit_knn.prepare`
writes it.
"""

import json
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lit_knn.errors import InputError

if TYPE_CHECKING:  # to prepare needs no torch, which takes seconds to load
    from torch import Tensor

MAGIC = b"lit_knn images\n"
VERSION = 1
# One page: what comes after it can be mapped by itself.
PAGE = 4096
PARTIAL_SUFFIX = ".partial"


class Header(NamedTuple):
    """What a prepared file says of itself.

    Attributes:
        shape: (N, C, H, W).
        has_labels: whether each image has one.
        sha256: of the pixels, 64 hexadecimal digits.
        origin: what the images were made from, and how; anything that JSON can write.
        version: of the format.
    """

    shape: tuple[int, ...]
    has_labels: bool
    sha256: str
    origin: dict[str, Any]
    version: int = VERSION

    @property
    def label_bytes(self) -> int:
        """Size of the labels."""
        return 8 * self.shape[0] if self.has_labels else 0

    @property
    def offset(self) -> int:
        """Where the pixels begin."""
        return PAGE + -(-self.label_bytes // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.offset + math.prod(self.shape)

    def encode(self) -> bytes:
        """The first page of the file."""
        content = MAGIC + json.dumps(self._asdict()).encode()
        assert len(content) < PAGE
        return content.ljust(PAGE - 1) + b"\n"


class PreparedImages(NamedTuple):
    """A prepared file, open.

    Attributes:
        images: (N, C, H, W), uint8, mapped: read by page when it is used, shared by the processes of a machine, and
            never to be written to.
        labels: (N,), int64, in memory, or None.
        header: what the file says of itself.
    """

    images: "Tensor"
    labels: np.ndarray | None
    header: Header


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a prepared file, checked against the size of the file.

    Raises:
        InputError: nothing there, a preparation that was not finished, another kind of file, another version, or a file
            that is too short or too long.
    """
    path = Path(path).expanduser()
    if not os.fspath(path) or not path.is_file():
        unfinished = path.with_name(path.name + PARTIAL_SUFFIX).exists() if path.name else False
        what, how = ("is not finished: run its", "again") if unfinished else ("is no file: make one with", "")
        raise InputError(f"{path} {what} python -m lit_knn.prepare {how}".rstrip())
    try:
        with open(path, "rb") as file:
            page, size = file.read(PAGE), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not page.startswith(MAGIC):
        raise InputError(f"{path} is no prepared file: make one with python -m lit_knn.prepare")
    header = _decode(path, page[len(MAGIC) :])
    if size != header.file_bytes:
        raise InputError(f"{path} has {size} bytes instead of {header.file_bytes}: prepare it again")
    return header


def read_prepared(path: str | os.PathLike[str]) -> PreparedImages:
    """Open a prepared file; the images stay on the disk.

    Raises:
        InputError: see `read_header`.
    """
    import torch

    header = read_header(path)
    path = Path(path).expanduser()
    labels = np.fromfile(path, "<i8", header.shape[0], offset=PAGE).astype(np.int64) if header.has_labels else None
    pixels = np.memmap(path, np.uint8, mode="r", offset=header.offset, shape=header.shape)
    with warnings.catch_warnings():
        # A mapping that could be written to would need as much memory set aside as the file is long.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return PreparedImages(torch.from_numpy(pixels), labels, header)


def _decode(path: Path, content: bytes) -> Header:
    try:
        fields = json.loads(content)
        version = fields["version"]
        if version != VERSION:
            raise InputError(f"{path} has version {version} of the format, this is version {VERSION}: prepare it again")
        header = Header(**{**fields, "shape": tuple(fields["shape"])})
    except InputError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} has a damaged header: prepare it again") from error
    if len(header.shape) != 4 or not all(type(n) is int and n > 0 for n in header.shape):
        raise InputError(f"{path} has a damaged header: prepare it again")
    return header
