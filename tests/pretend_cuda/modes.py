"""The two places where PyTorch hands over its calls: from Python, and from its dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend_cuda.device import DEVICE
from tests.pretend_cuda.operations import op_of
from tests.pretend_cuda.police import Police
from tests.pretend_cuda.tensor import PretendTensor


class DispatchMode(TorchDispatchMode):
    """Sees the operations of the dispatcher, also those without a pretended tensor."""

    def __init__(self, police: Police) -> None:
        super().__init__()
        self.police = police

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_of(func).composite:
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return self.police.run(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Sees the calls of PyTorch's functions from Python, before C++ looks at the devices of their tensors."""

    def __init__(self, police: Police) -> None:
        super().__init__()
        self.police = police

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not any(map(_is_or_has_pretended, [*args, *kwargs.values()])):
            return func(*args, **kwargs)
        func, args, kwargs = _moved(func, args, kwargs)
        if kwargs.get("device") is not None or any(isinstance(a, torch.device) for a in args):
            return func(*args, **kwargs)
        self.police.implicit += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.police.implicit -= 1


def _is_or_has_pretended(value: Any) -> bool:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(part, PretendTensor) for part in parts)


def _moved(func: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """Name the device in calls where C++ would take pretended tensors for the CPU's."""
    first, *rest = args or (None,)
    if func in (torch.tensor, torch.as_tensor, torch.asarray) and isinstance(first, PretendTensor):
        return func, args, {"device": DEVICE, **kwargs}
    like_other = func in (torch.Tensor.to, torch.Tensor.type_as) and rest and isinstance(rest[0], PretendTensor)
    if like_other and not isinstance(first, PretendTensor):
        return torch.Tensor.to, (first, *rest[1:]), {**kwargs, "device": DEVICE, "dtype": rest[0].dtype}
    if func is torch.Tensor.__setitem__ and isinstance(first, PretendTensor):
        mask = rest[0]
        if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and not isinstance(mask, PretendTensor):
            return func, (first, mask.to(DEVICE), *rest[1:]), kwargs
    return func, args, kwargs
