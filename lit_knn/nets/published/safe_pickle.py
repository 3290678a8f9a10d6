"""Reads the pickles of EDM's networks. It runs no code of a file.

A pickle names functions and classes, and Python's unpickler imports and calls them. Here it gets only the stand-ins of
`TABLE`, by the names that the file gives, and nothing else is looked up.
"""

import io
import mmap
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError, printable

# Header of the format before zip files, which `torch.save` still writes for a storage inside a pickle.
STORAGE_MAGIC, STORAGE_VERSION = 0x1950A86A20F9469CFC6C, 1001


class Refused(Exception):
    """The pickle asks for something that is refused; the message says what."""


class Record:
    """An object of the file: the name of its class without the module, and its state, of any type."""

    __slots__ = ("class_name", "state")

    def __init__(self, class_name: str, state: Any = None) -> None:
        self.class_name, self.state = class_name, state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class ModuleDict(Record):
    """A container of modules, which the file makes without arguments."""

    __slots__ = ()

    def __new__(cls) -> "ModuleDict":
        made = super().__new__(cls)
        Record.__init__(made, cls.__name__)
        return made


class StandIn(NamedTuple):
    """A function in the place of one that a file names. A tuple has no attributes that the file could set."""

    function: Callable[..., object]

    def __call__(self, *arguments: Any) -> object:
        return self.function(*arguments)


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


def load_safely(path: str | os.PathLike[str]) -> Any:
    """Read a pickle of EDM's code, protocol 4 or 5.

    Returns:
        Dicts, lists, tuples, sets, text, bytes and numbers (also for NumPy's numbers); objects as `Record`, tensors as
        `StoredTensor`.
    """
    try:
        # With a memory map, a byte count beyond the end of the file allocates nothing.
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Unpickler(data).load()
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be read: {error.strerror or error}") from error
    except Refused as error:
        raise InputError(f"{os.fspath(path)} {printable(str(error)[:200])}, which is refused") from error
    except Exception as error:  # A damaged pickle can raise any exception.
        raise InputError(f"{os.fspath(path)} is no pickle of an EDM network, or a damaged one") from error


class Unpickler(pickle.Unpickler):
    """Python's unpickler, which finds only stand-ins. A persistent id, which names a storage, stays a tuple."""

    def find_class(self, module: str, name: str) -> Any:
        known = f"{module}.{name}"
        if known not in TABLE and known not in STORAGES:
            raise Refused(f"names the global {known}")
        return TABLE.get(known, known)

    def persistent_load(self, pid: Any) -> Any:
        return pid


# Stand-ins for globals


def _persistent(meta: dict[str, Any]) -> Record:
    """Keep the class and the state of an object; the source text of its module is dropped unread."""
    return Record(meta["class_name"], meta["state"])


def _storage(data: bytes) -> Storage:
    """Read a storage that `torch.save` wrote: five small pickles, the number of values, and the values."""
    stream = io.BytesIO(data)
    magic, version, system, (kind, element, *_), _ = (Unpickler(stream).load() for _ in range(5))
    if (magic, version, system["little_endian"], kind) != (STORAGE_MAGIC, STORAGE_VERSION, True, "storage"):
        raise Refused("holds a tensor in an unknown format")
    return Storage(memoryview(data)[stream.tell() + 8 :], STORAGES[element])


def _tensor(storage: Storage, offset: int, size: tuple, stride: tuple, *ignored: object) -> StoredTensor:
    """Rebuild a tensor as a view of a storage; gradients, hooks and metadata are dropped."""
    width = storage.dtype.itemsize
    # NumPy refuses a view beyond its buffer. With strides of 0, a view could still be larger than that.
    view = np.ndarray((*size, width), np.uint8, storage.values, offset * width, (*(step * width for step in stride), 1))
    if view.nbytes > len(storage.values):
        raise Refused("rebuilds a tensor that is larger than its storage")
    return StoredTensor(view, storage.dtype)


def _scalar(kind: Record, value: bytes) -> object:
    """Make a plain number of a NumPy scalar, in the byte order that `_storage` demands."""
    return np.frombuffer(value, f"<{kind.class_name}").item()


# `object` and structured types of NumPy could hold other objects.
NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
STORAGES = {"torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64, "torch.LongStorage": torch.int64}
STORAGES |= {"torch.HalfStorage": torch.float16, "torch.BFloat16Storage": torch.bfloat16}
TABLE: Mapping[str, Any] = {
    "torch_utils.persistence._reconstruct_persistent_obj": StandIn(_persistent),
    "torch.storage._load_from_bytes": StandIn(_storage),
    "torch._utils._rebuild_tensor_v2": StandIn(_tensor),
    "torch._utils._rebuild_parameter": StandIn(lambda data, *ignored: data),
    "torch.nn.modules.container.ModuleDict": ModuleDict,
    "collections.OrderedDict": dict,
    "dnnlib.util.EasyDict": dict,
    "numpy.dtype": StandIn(lambda code, *ignored: Record(NUMBERS[NUMBERS.index(code)])),
    "numpy.core.multiarray.scalar": StandIn(_scalar),
    "numpy._core.multiarray.scalar": StandIn(_scalar),
}
