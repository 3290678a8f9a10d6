"""Checks of parsed values that hold for every option: null only where it means something, finite numbers."""

import inspect
import math
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import Namespace

from lit_knn.common.errors import InputError

LARGEST = 2**63 - 1
"""Largest integer that PyTorch and NumPy hold."""
# The parser notes here from which file a group of options was read, which says nothing about the options.
FILE_NOTE = "__path__"


def as_dict(value: Any) -> Any:
    """Turn the parser's namespaces into dictionaries, also those in lists, without its notes of the files read."""
    if isinstance(value, (Namespace, dict)):
        inner = vars(value) if isinstance(value, Namespace) else value
        return {name: as_dict(part) for name, part in inner.items() if name != FILE_NOTE}
    return [as_dict(part) for part in value] if isinstance(value, (list, tuple)) else value


def check_values(config: Mapping[str, Any], trainer_class: type) -> None:
    """Check every value of a parsed configuration.

    Raises:
        InputError: null for an option that needs a value; NaN, an infinite number, or an integer of more than 64 bits;
            a text with a null character.
    """
    for option, value in _leaves(config, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{option}: {value} is not a finite number")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise InputError(f"--{option}: {str(value)[:40]} is beyond 64 bits")
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"--{option}: the text holds a null character")
    if config.get("trainer") is None:
        raise InputError("--trainer: null is not allowed")
    _check_nulls(config["trainer"], trainer_class, "trainer")
    for option, class_path, arguments in _classes(config, ""):
        _check_nulls(arguments, pkgutil.resolve_name(class_path), option)


def _leaves(value: Any, option: str) -> Iterator[tuple[str, Any]]:
    """Yield each value that holds no others, with its option as on the command line."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, _inner(option, name))
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, option)
    else:
        yield option, value


def _classes(value: Any, option: str) -> Iterator[tuple[str, str, Any]]:
    """Yield option, class and arguments of each object that will be made."""
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield option, value["class_path"], value.get("init_args") or {}
        for name, part in value.items():
            yield from _classes(part, _inner(option, name))
    elif isinstance(value, list):
        for part in value:
            yield from _classes(part, option)


def _inner(option: str, name: str) -> str:
    return option if name == "init_args" else f"{option}.{name}".removeprefix(".")


def _check_nulls(arguments: Mapping[str, Any], kind: Any, option: str) -> None:
    """Refuse null for an argument whose type does not allow it. The parser lets every null pass."""
    missing = [name for name, value in arguments.items() if value is None]
    takes_null = _takes_null(kind) if missing else {}
    for name in missing:
        if not takes_null.get(name, True):
            raise InputError(f"--{option}.{name}: null is not allowed")


def _takes_null(kind: Any) -> dict[str, bool]:
    """Tell for each argument of a class whether it may be null. `**kwargs` stand for the arguments of its base."""
    found: dict[str, bool] = {}
    for base in inspect.getmro(kind) if isinstance(kind, type) else ():
        if "__init__" not in vars(base):
            continue
        try:
            constructor = vars(base)["__init__"]
            hints, signature = typing.get_type_hints(constructor), inspect.signature(constructor)
        except (NameError, TypeError, ValueError):
            break  # Nothing is known about this class.
        for name, parameter in signature.parameters.items():
            found.setdefault(name, parameter.default is None or _allows_none(hints.get(name, Any)))
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
            break
    return found


def _allows_none(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_allows_none(part) for part in typing.get_args(hint))
    return hint in (Any, None, type(None), object) or isinstance(hint, typing.TypeVar)
