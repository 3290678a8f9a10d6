"""The stand-in GPU flags what CUDA refuses and counts waits. All other tests marked `gpu` show what it accepts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pretend_cuda import DeviceMismatch, world_of_nccl

C = {"device": "cuda"}


BAD = {
    "pointwise": lambda: torch.randn(3, **C) + torch.randn(3),
    "stacked numbers": lambda: torch.stack([torch.ones((), **C), torch.ones(())]),
    "written into cpu": lambda: torch.tensor(1.0).add_(torch.tensor(1.0, **C)),
    "cpu tensor by cuda index": lambda: torch.randn(3)[torch.tensor([0], **C)],
    "assigned values": lambda: torch.randn(3, **C).__setitem__(
        torch.tensor([0, 1], **C), torch.zeros(2)
    ),
    "weights": lambda: nn.Linear(2, 2)(torch.randn(1, 2, **C)),
    "generator": lambda: torch.randn(3, generator=torch.Generator(), **C),
    "no kernel": lambda: torch.histogram(torch.zeros(3, **C), 2),
    "NumPy": lambda: np.asarray(torch.randn(3, **C)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cuda_refuses_is_flagged(stand_in, name):
    with pytest.raises(RuntimeError if name == "NumPy" else DeviceMismatch):
        BAD[name]()


SYNCS = {
    "number": (lambda x: x.sum().item(), 1),
    "condition": (lambda x: bool((x > 0).any()), 1),
    "copy to the host": (lambda x: x.cpu(), 1),
    "copy to the device": (lambda x: x + torch.ones(3).cuda(), 1),
    "copy that need not wait": (lambda x: x + torch.ones(3).to("cuda", non_blocking=True), 0),
    "mask": (lambda x: x[x > 0], 1),
    "a number where a mask is": (lambda x: x.__setitem__(x > 0, 1.0), 0),
    "unique": (lambda x: x.unique(), 1),
    "arithmetic": (lambda x: (x * torch.tensor(2.0) + 1).sum().exp(), 0),
    "cpu index": (lambda x: x[torch.tensor([0])], 1),
    "multinomial with replacement": (
        lambda x: torch.multinomial(x.abs() + 1, 2, replacement=True),
        0,
    ),
    "multinomial without": (lambda x: torch.multinomial(x.abs() + 1, 2), 1),
    "factorisation": (lambda x: torch.linalg.eigh(x[:, None] * x), 1),
    "synchronize": (lambda x: torch.cuda.synchronize(), 1),
}


@pytest.mark.parametrize("name", SYNCS)
def test_waits_are_counted_with_their_line(stand_in, name):
    (run, count), x = SYNCS[name], torch.ones(3, **C)
    with stand_in.record() as seen:
        run(x)
    assert seen.syncs == count, seen.report()
    assert all(" tests/gpu/test_pretend_cuda.py:" in site for site in seen)


def test_nccl_takes_tensors_of_the_device_alone(stand_in, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with world_of_nccl():
            dist.all_reduce(torch.ones(3, **C))
            with pytest.raises(DeviceMismatch, match="device type cpu"):
                dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(3), group=dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()
