"""Reads the pickles of EDM's networks without Python's unpickler, so that no code of a file runs.

`PickleMachine` calls only the functions of `TABLE`, which replace the globals that the file names.
"""

import io
import mmap
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError, printable
from lit_knn.nets.published.pickle_machine import PickledObject, PickleMachine, Refused, Value

# Header of the format before zip files, which `torch.save` still writes for a storage inside a pickle.
STORAGE_MAGIC, STORAGE_VERSION = 0x1950A86A20F9469CFC6C, 1001
# Bytes of the number of values, which stands before the values.
BYTES_OF_COUNT = 8


class Storage(NamedTuple):
    """The values behind tensors, as bytes."""

    values: memoryview
    dtype: torch.dtype


class StoredTensor(NamedTuple):
    """A tensor of the file: a view of its storage, (*size, bytes of an element) uint8, and its type."""

    values: np.ndarray
    dtype: torch.dtype

    def to_tensor(self) -> Tensor:
        """Make the tensor on the CPU, contiguous and with its own memory."""
        return torch.from_numpy(self.values.copy()).view(self.dtype).squeeze(-1)


def load_safely(path: str | os.PathLike[str]) -> Value:
    """Read a pickle of EDM's code, protocol 4 or 5.

    Returns:
        Dicts, lists, tuples, sets, text, bytes and numbers (also for NumPy's numbers); objects as
        `PickledObject`, tensors as `StoredTensor`.
    """
    name = os.fspath(path)
    try:
        # With a memory map, a byte count beyond the end of the file allocates nothing.
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return PickleMachine(TABLE, STORAGES).run(data)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error
    except Refused as error:
        raise InputError(f"{name} {printable(str(error)[:200])}, which is refused") from error
    except Exception as error:  # A damaged pickle can raise any exception.
        raise InputError(f"{name} is no pickle of an EDM network, or a damaged one") from error


# Stand-ins for globals


def _object(meta: Mapping[str, Value]) -> PickledObject:
    """Keep the class's name and the state; the source text of the object's module is dropped unread."""
    return PickledObject(meta["class_name"], meta["state"])


def _storage(data: bytes) -> Storage:
    """Read a storage that `torch.save` wrote: five small pickles, the number of values, and the values."""
    stream = io.BytesIO(data)
    header = [PickleMachine(TABLE, STORAGES).run(stream) for _ in range(5)]
    # The fifth pickle lists the keys of the storages, of which there is one.
    magic, version, system, storage_id, _ = header
    kind, element = storage_id[:2]

    known_format = (magic, version) == (STORAGE_MAGIC, STORAGE_VERSION)
    if not known_format or system["little_endian"] is not True or kind != "storage":
        raise Refused("holds a tensor in an unknown format")

    start = stream.tell() + BYTES_OF_COUNT
    return Storage(memoryview(data)[start:], STORAGES[element])


def _tensor(
    storage: Storage, offset: int, size: tuple, stride: tuple, *ignored: object
) -> StoredTensor:
    """Rebuild a tensor as a view of a storage; gradients, hooks and metadata are dropped."""
    width = storage.dtype.itemsize
    shape = (*size, width)
    strides = (*(step * width for step in stride), 1)
    view = np.ndarray(shape, np.uint8, storage.values, offset * width, strides)

    # NumPy refuses a view beyond its buffer, but with strides of 0 a view can have more values than its buffer.
    if view.nbytes > len(storage.values):
        raise Refused("rebuilds a tensor that is larger than its storage")
    return StoredTensor(view, storage.dtype)


def _parameter(data: StoredTensor, *ignored: object) -> StoredTensor:
    """Return the tensor of a parameter."""
    return data


def _dtype(code: str, *ignored: object) -> PickledObject:
    """Return the type of a NumPy scalar; ValueError for types that are no plain numbers."""
    # `index` raises this error.
    return PickledObject(NUMBERS[NUMBERS.index(code)])


def _scalar(kind: PickledObject, value: bytes) -> object:
    """Make a plain number of a NumPy scalar, in the byte order that `_storage` demands."""
    return np.frombuffer(value, f"<{kind.class_name}").item()


# `object` and structured types of NumPy could hold other objects.
NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}
TABLE: Mapping[str, Callable[..., object]] = {
    "torch_utils.persistence._reconstruct_persistent_obj": _object,
    "torch.storage._load_from_bytes": _storage,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.nn.modules.container.ModuleDict": lambda: PickledObject("ModuleDict"),
    "collections.OrderedDict": dict,
    "dnnlib.util.EasyDict": dict,
    "numpy.dtype": _dtype,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
