"""Objects that record the arguments they were made with, and short hashes of settings."""

import copy
import hashlib
import inspect
import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import PurePath
from types import FunctionType
from typing import Self

import torch
from torch import Tensor, nn

# Names of the attributes that every module has, such as `_parameters`, `_modules`, `training` and the hooks.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class RecordsArguments:
    """Records the arguments of the constructor, even if attributes store them under other names."""

    _arguments: Mapping[str, object] | None = None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        new_object = super().__new__(cls)
        # `copy` calls this without arguments, and then sets the attributes itself. For wrong arguments, __init__ raises
        # the error.
        with suppress(TypeError):
            new_object._arguments = bound_arguments(cls, args, kwargs)
        return new_object

    def settings(self) -> dict[str, object]:
        """Return the arguments of the constructor, with the current values of the attributes of the same names."""
        arguments = self._arguments or {}
        # Attributes of the class are not looked at, because they do not hold the constructor's argument.
        return {name: vars(self).get(name, value) for name, value in arguments.items()}

    def __repr__(self) -> str:
        """Show the class and its settings. A network is shown by its class, and null is left out."""
        shown = []
        for name, value in RecordsArguments.settings(self).items():
            # A class without a constructor has the arguments "args" and "kwargs", which are empty.
            if value is None or (type(value) in (tuple, dict) and not value):
                continue
            text = type(value).__name__ if isinstance(value, nn.Module) else repr(value)
            shown.append(f"{name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"


def bound_arguments(
    kind: type, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """Return the arguments of the constructor of a class, by name.

    Args:
        kind: the class.
        args: arguments by position.
        kwargs: arguments by name.

    Raises:
        TypeError: the constructor does not accept these arguments.
    """
    constructor: Callable[..., None] = kind.__init__  # type: ignore[misc]
    bound = inspect.signature(constructor).bind(None, *args, **kwargs)
    bound.apply_defaults()

    arguments = {}
    without_self = list(bound.arguments.items())[1:]
    for name, value in without_self:
        # Copied, because the constructor may change its lists and dictionaries in place.
        arguments[name] = copy.copy(value) if type(value) in (list, dict) else value
    return arguments


def flat_settings(name: str, part: RecordsArguments) -> dict[str, object]:
    """Return the class and the settings of a part, and of the parts that it holds, by dotted names."""
    flat: dict[str, object] = {name: type(part).__name__}
    for setting, value in part.settings().items():
        option = f"{name}.{setting}"
        if isinstance(value, RecordsArguments):
            flat.update(flat_settings(option, value))
        else:
            flat[option] = value
    return flat


def describe(thing: RecordsArguments) -> dict[str, object]:
    """Describe the class and the settings of an object in JSON types: plain values as they are, weights as a hash.

    Any other value becomes a unique string, so that a result with such a value is never used again.
    """
    arguments = thing._arguments or {}
    described = {}
    for name, value in thing.settings().items():
        described[name] = _described(value)
        # The setting may be no argument, or the argument may be None, which stands for a default.
        if arguments.get(name) is None:
            continue
        # The attribute may have another value than the argument had, for instance only a part of it.
        argument = _described(arguments[name])
        if argument != described[name]:
            described[name] = {"now": described[name], "given": argument}

    # An object may hold a network although its constructor was given only the name of a file.
    for name, part in vars(thing).items():
        if isinstance(part, nn.Module) and name not in described:
            described[name] = _described(part)
    # The settings of such an object do not tell all that its results depend on.
    if thing._arguments is None or isinstance(thing, nn.Module):
        described["unknown"] = _unlike_any_other()
    return {"class": _name(type(thing)), **described}


def fingerprint(settings: object) -> str:
    """Return a hash of 12 hexadecimal digits for anything that JSON can write."""
    return _hash(json.dumps(settings, sort_keys=True).encode())[:12]


def _described(value: object) -> object:
    """Describe a value in JSON, in which 1, 1.0, true, null and "1" differ."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, RecordsArguments):
        return describe(value)
    if isinstance(value, nn.Module):
        return _hash_of_module(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        # The hash is of the values in the order of their indexes, however they are stored.
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = plain.view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {_hash(content)}"
    if isinstance(value, (torch.dtype, torch.device, PurePath)):
        return f"{type(value).__name__} {value}"
    # A function in angle brackets, such as "<lambda>", cannot be told from others by its name.
    if isinstance(value, (type, FunctionType)) and "<" not in value.__qualname__:
        return _name(value)
    if isinstance(value, Mapping):
        return {"mapping": [[_described(name), _described(part)] for name, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_described(part) for part in value]
    # Such a value is an object of this program, for instance a noise process.
    if type(value).__module__.startswith("lit_knn.") and hasattr(value, "__dict__"):
        return [_name(type(value)), _described(vars(value))]
    return _unlike_any_other()


def _hash_of_module(module: nn.Module) -> str:
    """Hash the classes, attributes, parameters and buffers of a module and of all its parts."""
    parts = []
    for path, part in module.named_modules():
        # The attributes of every module are left out: parts, parameters and buffers are hashed anyway, and `training`
        # and the hooks do not change the output of a network at evaluation.
        attributes = {}
        for name, value in vars(part).items():
            if name not in OF_EVERY_MODULE:
                attributes[name] = value

        tensors = dict(part.named_parameters(recurse=False))
        tensors.update(part.named_buffers(recurse=False))
        parts.append([path, _name(type(part)), _described(attributes), _described(tensors)])
    return _hash(json.dumps(parts).encode())


def _name(thing: type | FunctionType) -> str:
    """Return the full name of a class or function, with its module."""
    return f"{thing.__module__}.{thing.__qualname__}"


def _unlike_any_other() -> str:
    """Return a text that no other call returns."""
    return f"unknown {uuid.uuid4()}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
