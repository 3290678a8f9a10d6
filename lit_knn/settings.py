"""Objects that report the settings they were made with, and short hashes of settings."""

import hashlib
import inspect
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

DIGITS = 12


class TellsSettings:
    """Records the arguments of the constructor, even if attributes store them under other names."""

    _arguments: Mapping[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments; a copy keeps the arguments of the original."""
        made = super().__new__(cls)
        try:
            bound = inspect.signature(cls.__init__).bind(made, *args, **kwargs)
        except TypeError:  # `copy` passes no arguments and sets the attributes itself; other errors come from __init__
            return made
        bound.apply_defaults()
        made._arguments = dict(list(bound.arguments.items())[1:])
        return made

    def settings(self) -> dict[str, Any]:
        """Return the settings that results depend on: the constructor's arguments, with their current values."""
        return {name: getattr(self, name, value) for name, value in self._arguments.items()}


def describe(thing: TellsSettings) -> dict[str, Any]:
    """Describe class and settings in JSON types: numbers and names as they are, weights as a hash.

    Any other value becomes a unique string, so different settings never look equal.
    """
    kind = type(thing)
    told = {name: _tell(value) for name, value in thing.settings().items()}
    return {"class": f"{kind.__module__}.{kind.__qualname__}", **told}


def fingerprint(settings: Any) -> str:
    """Hash anything that JSON can write to 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _tell(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, TellsSettings):
        return describe(value)
    if isinstance(value, nn.Module):
        return _hash_of_module(value)
    if isinstance(value, Tensor):
        return hashlib.sha256(_bytes(value)).hexdigest()
    if isinstance(value, Mapping):
        return {str(name): _tell(part) for name, part in value.items()}
    if isinstance(value, Sequence):
        return [_tell(part) for part in value]
    return f"untold {uuid.uuid4()}"


def _hash_of_module(module: nn.Module) -> str:
    numbers = {name: n for name, n in vars(module).items() if isinstance(n, (int, float)) and name != "training"}
    sha = hashlib.sha256(json.dumps([str(module), numbers], sort_keys=True).encode())
    for name, tensor in module.state_dict().items():
        sha.update(name.encode())
        sha.update(_bytes(tensor))
    return sha.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
