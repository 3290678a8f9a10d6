"""The pretended device, what it refuses, and its random generators."""

from __future__ import annotations

import weakref
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")


class DeviceMismatch(RuntimeError):
    """Tells of an operation that CUDA would refuse."""


class NotOnCuda(DeviceMismatch):
    """An operation that has no CUDA kernel, or none for these shapes and types."""


def canonical(device: Any) -> torch.device:
    """`cuda` -> `cuda:0`; other devices stay."""
    device = torch.device(device)
    return DEVICE if device.type == "cuda" else device


# PyTorch hands a generator to operations as another Python object. Its address tells which one it is.
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


def device_of_generator(generator: Any) -> torch.device:
    return _device_of.get(generator._cdata, CPU)
