"""Makes the objects that a configuration names. If one cannot be made, an error explains why in one line."""

import inspect
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.memory import machine_bytes, tensor_bytes

LARGEST = 2**63 - 1
"""Largest integer that PyTorch and NumPy hold."""
GB = 1e9


def construct(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Make an object of a class.

    Raises:
        InputError: the class does not take these arguments, or refuses their values; a network needs more memory than
            the machine has; the constructor of a class that is not ours fails.
    """
    name = kind.__name__
    try:
        inspect.signature(kind).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{name}: {error}") from error
    except ValueError:
        pass  # Python cannot list the arguments of a class written in C.
    check_arguments(name, kind, kwargs)
    own = kind.__module__.startswith("lit_knn.")
    try:
        # A training module is made of networks that exist already, or that a file holds.
        if own and issubclass(kind, nn.Module) and not issubclass(kind, pl.LightningModule):
            _check_size(kind, args, kwargs)
        return kind(*args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        if own or isinstance(error, OSError):
            raise
        raise InputError(f"{name}: {type(error).__name__}: {first_line(error)}") from error


def check_arguments(owner: str, kind: type, arguments: Mapping[str, Any]) -> None:
    """Refuse values that the parser passes and that would fail late: NaN, huge integers, and null.

    Raises:
        InputError: a number is not finite or has more than 64 bits; null is given for an argument that needs a value.
    """
    for name, value in arguments.items():
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise InputError(f"{owner}: {name}: {number} is not a finite number")
            if isinstance(number, int) and abs(number) > LARGEST:
                raise InputError(f"{owner}: {name}: {str(number)[:40]} is beyond 64 bits")
        if value is None and not _takes_null(kind, name):
            raise InputError(f"{owner}: {name}: null is not allowed")


def _takes_null(kind: type, name: str) -> bool:
    """Return whether an argument's type or default allows null; look up arguments of `**kwargs` in the base class."""
    for base in inspect.getmro(kind):
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        try:
            hints, parameter = typing.get_type_hints(constructor), inspect.signature(constructor).parameters.get(name)
        except (NameError, TypeError, ValueError):
            return True  # The arguments of this class are unknown.
        if parameter is not None:
            return parameter.default is None or _allows_none(hints.get(name, Any))
    return True


def _allows_none(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_allows_none(part) for part in typing.get_args(hint))
    return hint in (Any, None, type(None), object) or isinstance(hint, typing.TypeVar)


def _check_size(kind: type[nn.Module], args: Any, kwargs: Any) -> None:
    """Refuse a network whose weights exceed the memory. On the meta device, weights take no memory."""
    with torch.device("meta"):
        size, memory = tensor_bytes(kind(*args, **kwargs).parameters()), machine_bytes()
    if memory is not None and size > memory:
        raise InputError(
            f"{kind.__name__}: the weights take {size / GB:.4g} GB, more than the {memory / GB:.4g} GB of this machine"
        )
