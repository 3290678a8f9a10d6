"""Reads the pickles of EDM's networks without Python's unpickler, so that no code of a file runs.

A pickle is a program for a stack machine. Python's machine imports and calls what the program names, and sets
attributes. The machine here makes plain values, and calls only the functions of `TABLE`, which replace the globals
that the file names. It looks up no name of the file elsewhere.
"""

import io
import mmap
import os
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError, printable

# Header of the format before zip files, which `torch.save` still writes for a storage inside a pickle.
STORAGE_MAGIC, STORAGE_VERSION = 0x1950A86A20F9469CFC6C, 1001


class Refused(Exception):
    """The pickle asks for something that is refused; the message says what."""


@dataclass(slots=True, eq=False)
class Record:
    """An object of the file: the name of its class without the module, and its state, of any type."""

    class_name: str
    state: Any = None


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
            return _run(data)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be read: {error.strerror or error}") from error
    except Refused as error:
        raise InputError(
            f"{os.fspath(path)} {printable(str(error)[:200])}, which is refused"
        ) from error
    except Exception as error:  # A damaged pickle can raise any exception.
        raise InputError(
            f"{os.fspath(path)} is no pickle of an EDM network, or a damaged one"
        ) from error


# The machine: opcodes that push their argument, that push a constant, that push a new container, ...

ARGUMENTS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
}
ARGUMENTS |= {"BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
CONTAINERS: Mapping[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
# Frames only help to read ahead. A persistent id, which names a storage, stays what it is: a tuple.
IGNORED = {"PROTO", "FRAME", "BINPERSID"}
SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}


def _run(stream: BinaryIO) -> Any:
    """Run the pickle at the current position of `stream`, and stop after it."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks below the marks
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in ARGUMENTS:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in CONTAINERS:
            stack.append(CONTAINERS[name]())
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS", "ADDITEMS"):
            items, stack = stack, below.pop()
            _take(name, stack, items)
        elif name in SIZES:
            _take(name, stack, _popped(stack, SIZES[name]))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            names = _popped(stack, 2) if argument is None else argument.split(" ")
            known = ".".join(names)
            if known not in TABLE and known not in STORAGES:
                raise Refused(f"names the global {known}")
            stack.append(known)
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = _popped(stack, 2)
            stack.append(TABLE[function](*arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state  # Nothing but a record has or takes this attribute.
        elif name == "STOP":
            break
        elif name not in IGNORED:
            raise Refused(f"uses the pickle opcode {name}")
    return stack.pop()


def _popped(stack: list[Any], count: int) -> list[Any]:
    """Remove the last `count` items of the stack, and return them; IndexError if it has fewer."""
    return [stack.pop() for _ in range(count)][::-1]


def _take(name: str, stack: list[Any], items: list[Any]) -> None:
    """Make a tuple of the items, or put them into the container on top of the stack."""
    if name.startswith("TUPLE"):
        stack.append(tuple(items))
    elif name.startswith("APPEND"):
        stack[-1].extend(items)
    elif name.startswith("SETITEM"):
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    else:
        stack[-1].update(items)


# Stand-ins for globals


def _storage(data: bytes) -> Storage:
    """Read a storage that `torch.save` wrote: five small pickles, the number of values, and the values."""
    stream = io.BytesIO(data)
    magic, version, system, storage_id, _ = (_run(stream) for _ in range(5))
    kind, element = storage_id[:2]

    known_format = (magic, version) == (STORAGE_MAGIC, STORAGE_VERSION)
    if not known_format or system["little_endian"] is not True or kind != "storage":
        raise Refused("holds a tensor in an unknown format")

    # Eight bytes with the number of values come before the values.
    return Storage(memoryview(data)[stream.tell() + 8 :], STORAGES[element])


def _tensor(
    storage: Storage, offset: int, size: tuple, stride: tuple, *ignored: object
) -> StoredTensor:
    """Rebuild a tensor as a view of a storage; gradients, hooks and metadata are dropped."""
    width = storage.dtype.itemsize
    shape = (*size, width)
    strides = (*(step * width for step in stride), 1)
    view = np.ndarray(shape, np.uint8, storage.values, offset * width, strides)

    # NumPy refuses a view beyond its buffer. With strides of 0, a view could still be larger than
    # the buffer.
    if view.nbytes > len(storage.values):
        raise Refused("rebuilds a tensor that is larger than its storage")
    return StoredTensor(view, storage.dtype)


def _scalar(kind: Record, value: bytes) -> object:
    """Make a plain number of a NumPy scalar, in the byte order that `_storage` demands."""
    return np.frombuffer(value, f"<{kind.class_name}").item()


# `object` and structured types of NumPy could hold other objects.
NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
}
STORAGES |= {"torch.HalfStorage": torch.float16, "torch.BFloat16Storage": torch.bfloat16}
TABLE: Mapping[str, Callable[..., object]] = {
    # The source text of the object's module is dropped unread.
    "torch_utils.persistence._reconstruct_persistent_obj": lambda meta: Record(
        meta["class_name"], meta["state"]
    ),
    "torch.storage._load_from_bytes": _storage,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *ignored: data,
    "torch.nn.modules.container.ModuleDict": lambda: Record("ModuleDict"),
    "collections.OrderedDict": dict,
    "dnnlib.util.EasyDict": dict,
    "numpy.dtype": lambda code, *ignored: Record(NUMBERS[NUMBERS.index(code)]),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
