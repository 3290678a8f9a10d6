"""How much memory things take, told before they are made."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# The limit of a container, under versions 2 and 1 of control groups; a number, or `max`.
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def tensor_bytes(tensors: Any) -> int:
    """Bytes of some tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors)


def saved_bytes(model: nn.Module, run: Callable[[Any], Tensor]) -> int:
    """What autograd keeps for the backward pass of `run(model)`, parameters and buffers left out.

    A copy of the model runs on PyTorch's fake tensors, which have shapes but no values: nothing is computed. Not
    counted is what a pass allocates and frees again: a few of its largest activations, and the workspace of kernels.

    Args:
        model: any module; it is not changed.
        run: calls a model on inputs that it makes.
    """
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode()
    # Not the meta device, on which autocast does not work.
    with FakeCopyMode(mode):
        trial = copy.deepcopy(model).train()
    own = {t.untyped_storage()._cdata for t in (*trial.parameters(), *trial.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # which keeps its address from being used again
        return tensor

    with mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(trial)
    return sum(storage.nbytes() for storage in kept.values())


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
