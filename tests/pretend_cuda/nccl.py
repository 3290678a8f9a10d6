"""NCCL on the pretended device: gloo's collectives, which take tensors on the device alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.pretend_cuda.device import DEVICE, DeviceMismatch

# The name of the default group while it pretends to be NCCL's.
_pretending: set[str] = set()


@contextlib.contextmanager
def world_of_nccl() -> Iterator[None]:
    """Let the default group of gloo refuse tensors on the CPU; other groups stay gloo's.

    Collectives of objects then go through tensors on the device, as with NCCL.
    """
    before, world = distributed_c10d._get_object_coll_device, dist.group.WORLD.group_name

    def device(group: dist.ProcessGroup | None = None) -> object:
        return DEVICE if group in (None, dist.group.WORLD) else before(group)

    distributed_c10d._get_object_coll_device = device
    _pretending.add(world)
    try:
        yield
    finally:
        _pretending.clear()
        distributed_c10d._get_object_coll_device = before


def check_collective(name: str, given: list, pretended: bool) -> None:
    """Refuse a collective operation of CPU tensors in a group of NCCL."""
    # A barrier passes a tensor that it does not use.
    if pretended or not name.startswith("c10d::") or name == "c10d::barrier":
        return
    groups = [v for v in given if isinstance(v, torch.ScriptObject) and "ProcessGroup" in str(v._type())]
    if any(dist.ProcessGroup.unbox(group).group_name in _pretending for group in groups):
        raise DeviceMismatch(f"{name}: No backend type associated with device type cpu")
