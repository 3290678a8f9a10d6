"""The tensor that says it is on `cuda:0`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.pretend_cuda.device import DEVICE, canonical

# The police of the active `PretendCuda`, at most one.
active: list[Any] = []


class PretendTensor(torch.Tensor):
    """A tensor that says it is on cuda:0 and keeps its values on the CPU.

    C++ sees a CPU tensor with the dispatch keys of CUDA (autograd, autocast) and of Python. So autograd needs no
    driver, and every operation comes to `__torch_dispatch__`. Python code that asks for the device is told cuda:0.
    """

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> PretendTensor:
        assert type(values) is torch.Tensor, type(values)
        made = torch.Tensor._make_subclass(cls, values, False, device_for_backend_keys=DEVICE)  # type: ignore[attr-defined]
        made._values = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The modes of `PretendCuda` see most operations. Those of threads that autograd starts come here.
        if not active:
            raise RuntimeError(f"{func}: a pretended CUDA tensor is used outside `with PretendCuda()`")
        return active[0].run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `Tensor.to`. C++ takes this tensor for a CPU tensor, and would leave it as it is in `.to("cpu")`."""
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)  # PyTorch's parser does not know it.
        memory_format = kwargs.pop("memory_format", None)
        device, dtype, non_blocking, parsed_format = torch._C._nn._parse_to(*args, **kwargs)
        memory_format = memory_format or parsed_format
        dtype = dtype or self.dtype
        keep = memory_format is None or memory_format == torch.preserve_format
        if device is None or canonical(device) == DEVICE:
            if dtype == self.dtype and not copy and (keep or self.is_contiguous(memory_format=memory_format)):
                return self
            device = DEVICE
        options = {} if memory_format is None else {"memory_format": memory_format}
        to_copy = torch.ops.aten._to_copy.default
        return to_copy(self, dtype=dtype, device=device, non_blocking=non_blocking, **options)

    def cpu(self, memory_format: Any = torch.preserve_format) -> Any:
        return self.to("cpu", memory_format=memory_format)

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
            "first."
        )

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        dtype, device = dtype or self.dtype, DEVICE if device is None else device
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"pretend_cuda({inner(self)!r}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copied = self.detach().clone()
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = inner(self)
        with torch._C._DisableTorchDispatch():
            if getattr(self, "_is_param", False):
                values = torch.nn.Parameter(values, requires_grad=self.requires_grad)
            return values.__reduce_ex__(protocol)


def inner(t: PretendTensor) -> torch.Tensor:
    """The CPU tensor that has the same memory."""
    values = t._values
    with torch._C._DisableTorchDispatch():
        if values.data_ptr() == t.data_ptr() and values.shape == t.shape and values.stride() == t.stride():
            return values
        made = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride())
    t._values = made
    return made


def real(tree: Any) -> Any:
    """The values of pretended tensors in any nest of containers, without counting anything."""
    return tree_map_only(PretendTensor, inner, tree)
