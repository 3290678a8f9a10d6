"""The pretended device, what it refuses, and its random generators."""

from __future__ import annotations

import weakref
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")


class DeviceMismatch(RuntimeError):
    """An operation that CUDA would refuse."""


def canonical(device: Any) -> torch.device:
    """`cuda` -> `cuda:0`; other devices stay."""
    device = torch.device(device)
    return DEVICE if device.type == "cuda" else device


# PyTorch hands a generator to operations as another Python object. Its address says which one it is.
_device_of: dict[int, torch.device] = {}


class _GeneratorType(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class PretendGenerator(torch._C.Generator, metaclass=_GeneratorType):
    """A `torch.Generator` that may say it is on the pretended device. Its numbers are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> PretendGenerator:
        made = super().__new__(cls, "cpu")
        made._on = canonical(device)
        _device_of[made._cdata] = made._on
        weakref.finalize(made, _device_of.pop, made._cdata, None)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._on


def check_generators(name: str, given: list, device: torch.device) -> None:
    """Refuse a generator of another device than the operation's."""
    for value in given:
        if isinstance(value, torch._C.Generator):
            found = _device_of.get(value._cdata, CPU).type
            if found != device.type:
                raise DeviceMismatch(
                    f"{name}: Expected a '{device.type}' device type for generator but found '{found}'"
                )
