"""Objects that report the settings they were made with, and short hashes of settings."""

import copy
import dataclasses
import hashlib
import inspect
import json
import uuid
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from types import FunctionType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

DIGITS = 12
# Attributes of every module. `training` and hooks do not change the output of a network at evaluation.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class TellsSettings:
    """Records the arguments of the constructor, even if attributes store them under other names."""

    _arguments: Mapping[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments. A copy keeps the arguments of the original."""
        made = super().__new__(cls)
        try:
            bound = inspect.signature(cls.__init__).bind(made, *args, **kwargs)
        except TypeError:  # `copy` passes no arguments and sets the attributes itself; other errors come from __init__
            return made
        bound.apply_defaults()
        arguments = dict(list(bound.arguments.items())[1:])
        # Copy lists and dictionaries, because the constructor may change its arguments.
        made._arguments = {name: copy.copy(v) if type(v) in (list, dict) else v for name, v in arguments.items()}
        return made

    def given(self) -> dict[str, Any]:
        """Return the constructor's arguments as they were given; None stands for a default."""
        return dict(self._arguments or {})

    def settings(self) -> dict[str, Any]:
        """Return the settings that results depend on: the constructor's arguments, with their current values."""
        recorded, own = self._arguments or {}, vars(self)
        # Only attributes of the object count, because a class attribute does not hold the constructor's argument.
        return {name: getattr(self, name) if name in own else value for name, value in recorded.items()}


def describe(thing: TellsSettings) -> dict[str, Any]:
    """Describe class and settings in JSON types: numbers and names as they are, weights as a hash.

    Any other value becomes a unique string, so different settings never look equal.
    """
    kind, recorded = type(thing), thing._arguments or {}
    told = {name: _tell(value) for name, value in thing.settings().items()}
    # The arguments are also recorded as they were passed, because an attribute may keep only a part of its argument.
    # Arguments of None are skipped: they stand for a default, and `told` has the value in use.
    given = {name: _tell(value) for name, value in recorded.items() if name in told and value is not None}
    more: dict[str, Any] = {name: value for name, value in given.items() if value != told[name]}
    # An object may hold a network although its constructor was given only the name of a file.
    inside = {name: part for name, part in vars(thing).items() if isinstance(part, nn.Module) and name not in told}
    more |= {name: _tell(part) for name, part in inside.items()}
    # The record is incomplete if the class has its own `__new__`, which may hide arguments, or if the object is a
    # module, whose weights matter too.
    if thing._arguments is None or kind.__new__ is not TellsSettings.__new__ or isinstance(thing, nn.Module):
        more["untold"] = _untold()
    return {"class": _name(kind), **told, **({"not in settings": more} if more else {})}


def fingerprint(settings: Any) -> str:
    """Return a hash of 12 hexadecimal digits for anything that JSON can write."""
    return _hash(json.dumps(settings, sort_keys=True).encode())[:DIGITS]


def _tell(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, TellsSettings):
        return describe(value)
    if isinstance(value, nn.Module):
        return _hash_of_module(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return f"{value.dtype} {tuple(value.shape)} {_hash(_bytes(value))}"
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {_hash(value.tobytes())}"
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, (torch.dtype, torch.device, PurePath)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, (type, FunctionType)) and "<" not in value.__qualname__:
        return _name(value)
    if dataclasses.is_dataclass(value):
        return {"class": _name(type(value)), **{name: _tell(part) for name, part in vars(value).items()}}
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value):
            return {name: _tell(part) for name, part in value.items()}
        return [[_tell(name), _tell(part)] for name, part in value.items()]
    if isinstance(value, Sequence):
        return [_tell(part) for part in value]
    return _untold()


def _hash_of_module(module: nn.Module) -> str:
    told = []
    for path, part in module.named_modules():
        own = {name: _tell(value) for name, value in vars(part).items() if name not in OF_EVERY_MODULE}
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        told.append(
            [path, _name(type(part)), part.extra_repr(), own, {name: _tell(tensor) for name, tensor in tensors}]
        )
    return _hash(json.dumps(told, sort_keys=True).encode())


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _untold() -> str:
    return f"untold {uuid.uuid4()}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()
