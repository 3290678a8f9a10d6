"""How much memory things take, told before they are made."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# The limit of a container, under versions 2 and 1 of control groups; a number, or `max`.
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def tensor_bytes(tensors: Any) -> int:
    """Bytes of some tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors)


def saved_bytes(
    model: nn.Module, run: Callable[[Any], Tensor], device_type: str = "cpu", autocast: torch.dtype | None = None
) -> int:
    """What autograd keeps for the backward pass of `run(model)`, parameters and buffers left out.

    A copy of the model runs on PyTorch's fake tensors, which have shapes but no values: nothing is computed, and this
    machine need not have such a device. Not counted is what a pass allocates and frees again: a few of its largest
    activations, and the workspace of kernels.

    Args:
        model: any module; it is not changed.
        run: calls a model on inputs that it makes, on the device of the model.
        device_type: `cpu` or `cuda`; they keep some operations in float32 under autocast that the other does not.
        autocast: the type of mixed precision; None without.
    """
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode()
    # Not the meta device, on which autocast does not work.
    with FakeCopyMode(mode):
        trial = copy.deepcopy(model).train()
    if device_type != "cpu":
        with mode:
            _move(trial, device_type)
    own = {t.untyped_storage()._cdata for t in (*trial.parameters(), *trial.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # which keeps its address from being used again
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    attention = nullcontext() if device_type == "cpu" or torch.cuda.is_available() else _FusedAttention(autocast)
    with _autocast(device_type, autocast), mode, attention, hooks:
        run(trial)
    return sum(storage.nbytes() for storage in kept.values())


class _FusedAttention(TorchFunctionMode):
    """Attention as a GPU does it; where there is none, PyTorch would keep the (L, L) matrices of all heads."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        shape = args[0].shape
        q, k, v = (x.to(self.dtype or x.dtype).reshape(-1, *x.shape[-3:]) for x in args[:3])
        attended = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, compute_log_sumexp=True)[0]
        return attended.reshape(shape)


def _move(model: nn.Module, device_type: str) -> None:
    """`model.to`, which refuses fake tensors."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made = torch.empty(p.shape, dtype=p.dtype, device=device_type)
                module._parameters[name] = nn.Parameter(made, requires_grad=p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device=device_type)


@contextmanager
def _autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """`torch.autocast`, which does nothing for a kind of device that this machine lacks."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        with warnings.catch_warnings():
            # Of modules that turn autocast off for a part of them.
            warnings.filterwarnings("ignore", message=".*CUDA is not available")
            yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def machine_bytes() -> int | None:
    """Memory of this machine, or of the container this process runs in; None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        total = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    except OSError:
        return None
    for path in CONTAINER_LIMITS:
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def process_bytes() -> int:
    """Memory this process has resident now; 0 if the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
