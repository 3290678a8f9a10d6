"""An .npy file that grows piece by piece."""

import io
import os

import numpy as np


def npy_header(N: int, shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    """Return the header of an .npy file. It has the same length for every N.

    Args:
        N: number of items.
        shape: shape of an item, such as (C, H, W).
        descr: NumPy's text for the type of the values; the default is uint8.
    """
    start = io.BytesIO()
    fields = {"descr": descr, "fortran_order": False, "shape": (N, *shape)}
    np.lib.format.write_array_header_1_0(start, fields)
    return start.getvalue()


def cut(file: io.BufferedRandom, header: bytes, done: int) -> None:
    """Cut off what is not done, write the header, and stay behind it.

    Args:
        file: the partial file.
        header: the header of an .npy file, see `npy_header`.
        done: bytes behind the header that are done.
    """
    file.truncate(len(header) + done)
    file.seek(0)
    file.write(header)


def append(file: io.BufferedRandom, pixels: bytes) -> None:
    """Write bytes at the current position, and wait until they are on the disk."""
    file.write(pixels)
    file.flush()
    os.fsync(file.fileno())
