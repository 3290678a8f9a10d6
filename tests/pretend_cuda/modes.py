"""The two places where PyTorch hands over its calls: from Python, and from its dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend_cuda.device import DEVICE
from tests.pretend_cuda.operations import TO_FLOAT32, TO_LOWER, op_of
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
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = _autocast(func, args, kwargs)
        if func is torch.nn.functional.one_hot and len(args) + len(kwargs) == 2:
            classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            if classes > 0:
                return _one_hot(args[0], classes)
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


def _one_hot(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """As on a GPU, which does not look at the classes."""
    out = torch.zeros(*labels.shape, classes, dtype=torch.int64, device=DEVICE)
    return out.scatter_(-1, labels.unsqueeze(-1), 1)


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


def _autocast(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Cast as torch.amp does."""
    if func in TO_LOWER:
        dtype = torch.get_autocast_dtype("cuda")
        sources: tuple = (torch.float32, torch.float16, torch.bfloat16)
    elif func in TO_FLOAT32:
        dtype, sources = torch.float32, (torch.float16, torch.bfloat16)
    else:
        return args, kwargs

    def cast(a: Any) -> Any:
        return a.to(dtype) if isinstance(a, PretendTensor) and a.dtype in sources and a.dtype != dtype else a

    return tuple(map(cast, args)), {name: cast(a) for name, a in kwargs.items()}
