"""A pickle reader that runs no code of the file: it turns objects into inert records or refuses the file.

It imports nothing, and looks up and calls only the entries of the tables below, which are functions and types of this
package. They are sealed, because a pickle can also set attributes of every object that it reaches.
"""

import io
import math
import mmap
import os
import pickle
import pickletools
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.nets.published.inert_numpy import NUMPY_GLOBALS
from lit_knn.nets.published.inert_objects import (
    MAX_DIMENSIONS,
    Function,
    Inert,
    InertDict,
    Name,
    Record,
    Refused,
    is_size,
    printable,
)

# Opcodes that reach objects of the running process without `find_class`.
REFUSED_OPCODES = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
PERSISTENT_OPCODES = {"PERSID", "BINPERSID"}
MEMO_OPCODES = {"PUT", "BINPUT", "LONG_BINPUT"}
# Header of the format before zip files, which `torch.save` still writes for a storage inside a pickle.
STORAGE_MAGIC = 0x1950A86A20F9469CFC6C
STORAGE_VERSION = 1001


class _Storage(Inert):
    """The values behind tensors, as bytes."""

    __slots__ = ("dtype", "size", "values")

    def __init__(self, dtype: torch.dtype, size: int, values: memoryview) -> None:
        self.dtype, self.size, self.values = dtype, size, values


class TensorRecord(Inert):
    """Holds the parts of a tensor, because a pickle could call the methods of a real tensor."""

    __slots__ = ("offset", "size", "storage", "stride")

    def __init__(self, storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.size) * self.storage.dtype.itemsize

    def to_tensor(self) -> Tensor:
        """Make the tensor on the CPU, contiguous and with its own memory."""
        dtype = self.storage.dtype
        if not self.nbytes:
            return torch.empty(self.size, dtype=dtype)
        flat = torch.frombuffer(bytearray(self.storage.values), dtype=dtype)
        tensor = flat.as_strided(self.size, self.stride, self.offset)
        alone = tensor.nbytes == flat.nbytes and tensor.is_contiguous()
        return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


class _StorageType(Inert):
    """Stand-in for a PyTorch storage class; it holds the element type."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _StorageHeader(Inert):
    """Element type and number of elements of a storage."""

    __slots__ = ("dtype", "size")

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        self.dtype, self.size = dtype, size


def load_inert(path: str | os.PathLike[str]) -> Any:
    """Read a pickle of EDM networks without running any code of it.

    Args:
        path: the file, of any pickle protocol.

    Returns:
        Dicts, lists, tuples, sets, text and numbers (NumPy scalars become numbers); objects as `Record`, tensors as
        `TensorRecord`, NumPy arrays as `ArrayRecord`.

    Raises:
        InputError: the file is missing, truncated, damaged or no pickle; it names a global outside the allow-list.
    """
    path = Path(path)
    # Opening a pipe would wait for somebody to write to it.
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no file, but a folder, a pipe, a socket or a device")
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise InputError(f"{path} is empty")
            # With a memory map, a byte count beyond the end of the file allocates nothing.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _load_file(path, data)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _load_file(path: Path, data: mmap.mmap) -> Any:
    try:
        return _load_next(data, ALLOWED)  # type: ignore[arg-type]
    except Refused as error:
        raise InputError(f"{path} {error}") from error
    except Exception as error:  # Bad pickles can raise any exception.
        if data.tell() >= len(data) and data[:1] == pickle.PROTO:
            raise InputError(f"{path} is truncated, or damaged") from error
        raise InputError(f"{path} is not a pickle, or a damaged one") from error


def _load_next(stream: BinaryIO, allowed: Mapping[tuple[str, str], object], persistent: bool = False) -> Any:
    """Read one pickle from the current position of `stream`, and stop after it."""
    start = stream.tell()
    _check_opcodes(stream, persistent)
    end = stream.tell()
    stream.seek(start)
    loaded = _Unpickler(stream, allowed).load()
    if stream.tell() != end:
        raise Refused("has an ambiguous end, which is refused")
    return loaded


def _check_opcodes(stream: BinaryIO, persistent: bool) -> None:
    """Refuse opcodes that bypass `find_class`, and memo indices that would allocate far more than the file's size."""
    frame_end = None
    for count, (opcode, argument, position) in enumerate(pickletools.genops(stream)):
        name = opcode.name
        assert position is not None
        frame_end = _checked_frame(frame_end, name, argument, position)
        if name in REFUSED_OPCODES or (name in PERSISTENT_OPCODES and not persistent):
            raise Refused(f"uses the pickle opcode {name} ({printable(argument)}), which is refused")
        if name in MEMO_OPCODES and isinstance(argument, int) and argument > count:
            raise Refused(f"has the memo index {argument} after {count} opcodes, which is refused")


def _checked_frame(frame_end: int | None, name: str, argument: Any, position: int) -> int | None:
    """Return the end of the frame of an opcode, or None outside of frames.

    Python's unpickler skips bytes if a frame ends within an opcode. It would then read other opcodes than were checked.
    """
    if frame_end is not None and position >= frame_end:
        if position > frame_end:
            raise Refused("has a frame that ends within an opcode, which is refused")
        frame_end = None
    if name == "FRAME":
        if frame_end is not None:
            raise Refused("has a frame within a frame, which is refused")
        return position + 9 + int(argument)
    if name == "STOP" and frame_end not in (None, position + 1):
        raise Refused("has a frame that ends elsewhere than its pickle, which is refused")
    return frame_end


class _Unpickler(pickle.Unpickler):
    """Looks globals up in a table instead of importing them."""

    def __init__(self, stream: BinaryIO, allowed: Mapping[tuple[str, str], object]) -> None:
        super().__init__(stream)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a global, or raise Refused if the table has none."""
        if (module, name) not in self._allowed:
            raise Refused(f"names the global {printable(f'{module}.{name}')}, which is refused; nothing of it ran")
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> _StorageHeader:
        """Read the header of a storage: ("storage", type, key, location, number of elements, view)."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise Refused("holds a tensor in an unknown format, which is refused")
        if not isinstance(pid[1], _StorageType) or type(pid[4]) is not int or any(view is not None for view in pid[5:]):
            raise Refused("holds a tensor in an unknown format, which is refused")
        return _StorageHeader(pid[1].dtype, pid[4])


# Stand-ins for the allowed functions.


def _persistent_object(meta: object) -> Record:
    """Rebuild an object of EDM's persistence module; its source text, `module_src`, is dropped unread."""
    if not isinstance(meta, dict) or meta.get("type") != "class":
        raise Refused("holds a persistent object that is not of type 'class', which is refused")
    class_name, state = meta.get("class_name"), meta.get("state")
    if not isinstance(class_name, str) or not isinstance(state, dict):
        raise Refused("holds a persistent object without class_name and state, which is refused")
    record = Record()
    record.class_name, record.state = class_name, state
    return record


def _reconstructor(cls: object, base: object, state: object) -> object:
    """Rebuild an object of pickle protocol 0 or 1; its state follows."""
    if cls not in (Record, InertDict):
        raise Refused("reconstructs an object of an unknown class, which is refused")
    return Record() if cls is Record else InertDict(state if isinstance(state, dict) else {})


def _encode(text: object, encoding: object = "") -> bytes:
    """Rebuild bytes of pickle protocols 0 to 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise Refused("encodes bytes in another way than as latin1, which is refused")
    return text.encode("latin1")


def _storage(data: object) -> _Storage:
    """Rebuild a storage that `torch.save` wrote: five small pickles, a count and the raw values."""
    if not isinstance(data, bytes):
        raise Refused("holds a tensor whose values are not bytes, which is refused")
    stream = io.BytesIO(data)
    magic, version, system = (_load_next(stream, {}) for _ in range(3))
    if magic != STORAGE_MAGIC or version != STORAGE_VERSION or system.get("little_endian") is not True:
        raise Refused("holds a tensor in an unknown format, which is refused")
    header = _load_next(stream, STORAGE_TYPES, persistent=True)
    _load_next(stream, {})
    (size,) = struct.unpack("<q", stream.read(8))
    values = memoryview(data)[stream.tell() :]
    if not isinstance(header, _StorageHeader) or size != header.size or size * header.dtype.itemsize != len(values):
        raise Refused("holds a tensor with too many or too few values, which is refused")
    return _Storage(header.dtype, size, values)


def _tensor(storage: object, offset: object, size: object, stride: object, *ignored: object) -> TensorRecord:
    """Rebuild a tensor as a view of a storage; gradients, hooks and metadata are dropped."""
    if not isinstance(storage, _Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise Refused("rebuilds a tensor from other things than a storage, a size and a stride, which is refused")
    if len(size) != len(stride) or len(size) > MAX_DIMENSIONS or not all(map(is_size, (offset, *size, *stride))):
        raise Refused("rebuilds a tensor of an impossible size, which is refused")
    assert isinstance(offset, int)
    count = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    # With strides of 0, a small storage could become a huge tensor.
    if count and (count > storage.size or last >= storage.size):
        raise Refused("rebuilds a tensor that is larger than its storage, which is refused")
    return TensorRecord(storage, offset, size, stride)


def _parameter(data: object, *ignored: object) -> TensorRecord:
    if not isinstance(data, TensorRecord):
        raise Refused("makes a parameter of something other than a tensor, which is refused")
    return data


STORAGE_TYPES: Mapping[tuple[str, str], object] = {
    ("torch", "FloatStorage"): _StorageType(torch.float32),
    ("torch", "DoubleStorage"): _StorageType(torch.float64),
    ("torch", "HalfStorage"): _StorageType(torch.float16),
    ("torch", "BFloat16Storage"): _StorageType(torch.bfloat16),
    ("torch", "LongStorage"): _StorageType(torch.int64),
    ("torch", "IntStorage"): _StorageType(torch.int32),
    ("torch", "ShortStorage"): _StorageType(torch.int16),
    ("torch", "CharStorage"): _StorageType(torch.int8),
    ("torch", "ByteStorage"): _StorageType(torch.uint8),
}
TORCH_MODULES = {
    "activation": ("SiLU",),
    "container": ("ModuleDict", "ModuleList", "Sequential"),
    "conv": ("Conv2d",),
    "dropout": ("Dropout",),
    "linear": ("Identity", "Linear"),
    "normalization": ("GroupNorm",),
}
ALLOWED: Mapping[tuple[str, str], object] = {
    ("torch_utils.persistence", "_reconstruct_persistent_obj"): Function(_persistent_object),
    ("torch.storage", "_load_from_bytes"): Function(_storage),
    ("torch._utils", "_rebuild_tensor"): Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor),
    ("torch._utils", "_rebuild_parameter"): Function(_parameter),
    ("torch", "Size"): Function(lambda size=(): tuple(size)),
    ("torch", "device"): Function(lambda *name: "cpu"),
    ("collections", "OrderedDict"): InertDict,
    ("dnnlib.util", "EasyDict"): InertDict,
    ("builtins", "set"): Function(lambda items=(): set(items)),
    ("__builtin__", "set"): Function(lambda items=(): set(items)),
    ("builtins", "object"): Name(),
    ("__builtin__", "object"): Name(),
    ("builtins", "dict"): Name(),
    ("__builtin__", "dict"): Name(),
    ("copyreg", "_reconstructor"): Function(_reconstructor),
    ("copy_reg", "_reconstructor"): Function(_reconstructor),
    ("_codecs", "encode"): Function(_encode),
    ("builtins", "bytes"): Function(lambda: b""),
    ("__builtin__", "bytes"): Function(lambda: b""),
    **NUMPY_GLOBALS,
    **{(f"torch.nn.modules.{file}", name): Record for file, names in TORCH_MODULES.items() for name in names},
}
