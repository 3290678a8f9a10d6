"""Objects that record the arguments they were made with, and short hashes of settings."""

import copy
import hashlib
import inspect
import json
import uuid
from collections.abc import Mapping
from pathlib import PurePath
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor, nn

# Attributes of every module. `training` and hooks do not change the output of a network at evaluation.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class RecordsArguments:
    """Records the arguments of the constructor, even if attributes store them under other names."""

    _arguments: Mapping[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        try:
            bound = inspect.signature(cls.__init__).bind(made, *args, **kwargs)
        except TypeError:  # `copy` passes no arguments and sets the attributes itself; other errors come from __init__
            return made
        bound.apply_defaults()
        # Copy lists and dictionaries, because the constructor may change its arguments.
        given = list(bound.arguments.items())[1:]
        made._arguments = {
            name: copy.copy(value) if type(value) in (list, dict) else value
            for name, value in given
        }
        return made

    def given(self) -> dict[str, Any]:
        """Return the constructor's arguments as they were given; None stands for a default."""
        return dict(self._arguments or {})

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments with the current values of the attributes of the same names, if any."""
        # Only attributes of the object count, because a class attribute does not hold the constructor's argument.
        return {
            name: getattr(self, name) if name in vars(self) else value
            for name, value in self.given().items()
        }


def flat_settings(name: str, part: RecordsArguments) -> dict[str, Any]:
    """Return the class and the settings of a part, and of the parts that it holds, by dotted names."""
    found: dict[str, Any] = {name: type(part).__name__}
    for own, value in part.settings().items():
        option = f"{name}.{own}"
        found |= (
            flat_settings(option, value) if isinstance(value, RecordsArguments) else {option: value}
        )
    return found


def describe(thing: RecordsArguments) -> dict[str, Any]:
    """Describe class and settings in JSON types: numbers and names as they are, weights as a hash.

    Any other value becomes a unique string, so that a result with such a value is never used again.
    """
    given, described = (
        thing.given(),
        {name: _described(value) for name, value in thing.settings().items()},
    )
    # A class may have settings of its own instead of its arguments.
    for name in described.keys() & given.keys():
        # An attribute may hold the default that None stands for, but it may also keep only a part of its argument.
        if given[name] is not None and (passed := _described(given[name])) != described[name]:
            described[name] = {"now": described[name], "given": passed}
    # An object may hold a network although its constructor was given only the name of a file.
    held = {
        name: part
        for name, part in vars(thing).items()
        if isinstance(part, nn.Module) and name not in described
    }
    described |= {name: _described(part) for name, part in held.items()}
    if thing._arguments is None or isinstance(thing, nn.Module):
        described["unknown"] = _unlike_any_other()
    return {"class": _name(type(thing)), **described}


def fingerprint(settings: Any) -> str:
    """Return a hash of 12 hexadecimal digits for anything that JSON can write."""
    return _hash(json.dumps(settings, sort_keys=True).encode())[:12]


def _described(value: Any) -> Any:
    """Describe a value in JSON, in which 1, 1.0, true, null and "1" differ."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, RecordsArguments):
        return describe(value)
    if isinstance(value, nn.Module):
        return _hash(
            json.dumps([[path, *_of_module(part)] for path, part in value.named_modules()]).encode()
        )
    if isinstance(value, Tensor) and value.layout == torch.strided:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return f"{value.dtype} {tuple(value.shape)} {_hash(plain.view(-1).view(torch.uint8).numpy().tobytes())}"
    if isinstance(value, (torch.dtype, torch.device, PurePath)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, (type, FunctionType)) and "<" not in value.__qualname__:
        return _name(value)
    if isinstance(value, Mapping):
        return {"mapping": [[_described(name), _described(part)] for name, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_described(part) for part in value]
    # such as a noise process
    if type(value).__module__.startswith("lit_knn.") and hasattr(value, "__dict__"):
        return [_name(type(value)), _described(vars(value))]
    return _unlike_any_other()


def _of_module(part: nn.Module) -> list[Any]:
    own = {name: value for name, value in vars(part).items() if name not in OF_EVERY_MODULE}
    tensors = dict([*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])
    return [_name(type(part)), _described(own), _described(tensors)]


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _unlike_any_other() -> str:
    return f"unknown {uuid.uuid4()}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
