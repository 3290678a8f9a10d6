"""NCCL on the pretended device: gloo's collectives, which take tensors on the device alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.pretend_cuda.device import DEVICE, DeviceMismatch

# Names of the process groups that pretend to be NCCL's.
_groups: set[str] = set()


@contextlib.contextmanager
def install_fake_nccl() -> Iterator[None]:
    """Make `torch.distributed` accept the backend `nccl`, whose groups refuse tensors on the CPU.

    Groups that name no backend have that of the first group, as in PyTorch. Collectives of objects then go through
    tensors on the device, as with NCCL.
    """
    init, new_group, object_device = dist.init_process_group, dist.new_group, distributed_c10d._get_object_coll_device

    def fake_init(backend: Any = None, **options: Any) -> None:
        init("gloo" if backend in (None, "nccl") else backend, **options)
        if backend in (None, "nccl"):
            _groups.add(dist.group.WORLD.group_name)

    def fake_new_group(*args: Any, backend: Any = None, **options: Any) -> Any:
        made = new_group(*args, backend="gloo" if backend == "nccl" else backend, **options)
        if backend == "nccl" or (backend is None and _is_fake(dist.group.WORLD)):
            _groups.add(made.group_name)
        return made

    def fake_object_device(group: Any = None) -> Any:
        return DEVICE if _is_fake(group or dist.group.WORLD) else object_device(group)

    patches = [(dist, "init_process_group", fake_init), (dist, "new_group", fake_new_group)]
    patches.append((distributed_c10d, "_get_object_coll_device", fake_object_device))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        _groups.clear()
        for owner, name, value in before:
            setattr(owner, name, value)


def check_collective(name: str, given: list, pretended: bool) -> None:
    """Refuse a collective operation of CPU tensors in a group of NCCL."""
    # A barrier passes a tensor that it does not use.
    if pretended or not name.startswith("c10d::") or name == "c10d::barrier":
        return
    boxed = [value for value in given if isinstance(value, torch.ScriptObject)]
    if any(_is_fake(dist.ProcessGroup.unbox(value)) for value in boxed if "ProcessGroup" in str(value._type())):
        raise DeviceMismatch(f"{name}: No backend type associated with device type cpu")


def _is_fake(group: Any) -> bool:
    return group is not None and group.group_name in _groups
