"""The stand-in GPU flags what CUDA refuses and counts waits. All other tests marked `gpu` show what it accepts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests import ROOT
from tests.pretend_cuda import DeviceMismatch, PretendCuda, install_fake_nccl, real

C = {"device": "cuda"}


@pytest.fixture
def gpu():
    with PretendCuda(project=ROOT) as gpu:
        yield gpu


def eights(rows, columns=8):
    return torch.zeros(rows, columns, dtype=torch.int8, **C)


BAD = {
    "pointwise": lambda: torch.randn(3, **C) + torch.randn(3),
    "written into cpu": lambda: torch.tensor(1.0).add_(torch.tensor(1.0, **C)),
    "product": lambda: torch.randn(3, 3, **C) @ torch.randn(3, 3),
    "branch of where": lambda: torch.where(torch.ones(3, dtype=torch.bool, **C), torch.zeros(3), torch.ones(3, **C)),
    "index of index_select": lambda: torch.randn(3, **C).index_select(0, torch.tensor([0])),
    "cpu tensor by cuda index": lambda: torch.randn(3)[torch.tensor([0], **C)],
    "assigned values": lambda: torch.randn(3, **C).__setitem__(torch.tensor([0, 1], **C), torch.zeros(2)),
    "cpu mask": lambda: torch.randn(3, **C).masked_fill(torch.ones(3, dtype=torch.bool), 0.0),
    "weights": lambda: nn.Linear(2, 2)(torch.randn(1, 2, **C)),
    "generator": lambda: torch.randn(3, generator=torch.Generator(), **C),
    "no scalar for nextafter": lambda: torch.nextafter(torch.randn(3, **C), torch.tensor(1.0)),
    "int_mm of 16 rows": lambda: torch._int_mm(eights(16), eights(8)),
    "int_mm of 9 columns": lambda: torch._int_mm(eights(17), eights(8, 9)),
    "int_mm of rows": lambda: torch._int_mm(eights(17), eights(8, 16)),
    "no kernel": lambda: torch.histogram(torch.zeros(3, **C), 2),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cuda_refuses_is_flagged(gpu, name):
    with pytest.raises(DeviceMismatch):
        BAD[name]()


def test_numpy_of_a_cuda_tensor_is_refused(gpu):
    for how in (torch.Tensor.numpy, np.asarray):
        with pytest.raises((TypeError, RuntimeError)):
            how(torch.randn(3, **C))


def test_values_views_and_writes_are_those_of_the_cpu(gpu):
    x = torch.arange(12.0, **C).view(3, 4)
    want = torch.arange(12.0).view(3, 4)
    for tensor in (x, want):
        tensor[1] += 1
        tensor[:, 2].mul_(2)
        tensor.T[0, 2] = -1
    assert torch.equal(real(x), want)
    assert x.device == x.T.device == torch.device("cuda:0")
    assert type(x.cpu()) is torch.Tensor


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
    "multinomial with replacement": (lambda x: torch.multinomial(x.abs() + 1, 2, replacement=True), 0),
    "multinomial without": (lambda x: torch.multinomial(x.abs() + 1, 2), 1),
    "factorisation": (lambda x: torch.linalg.eigh(x[:, None] * x), 1),
    "printing": (lambda x: f"{x.max():.3f}", 1),
    "synchronize": (lambda x: torch.cuda.synchronize(), 1),
}


@pytest.mark.parametrize("name", SYNCS)
def test_waits_are_counted_with_their_line(gpu, name):
    run, count = SYNCS[name]
    with torch.inference_mode():
        x = torch.ones(3, **C)
        with gpu.record() as seen:
            run(x)
    assert seen.syncs == count, seen.report()
    assert all(site.startswith("tests/gpu/test_pretend_cuda.py:") for _, site in seen.sync_sites)


def test_the_devices_have_random_streams_of_their_own(gpu):
    x, before = torch.ones(1000, **C), torch.default_generator.get_state()
    torch.cuda.manual_seed(3)
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    torch.cuda.manual_seed(3)
    assert torch.equal(real(first), real(F.dropout(x, 0.5)))
    assert not torch.equal(real(first), real(second))
    assert torch.equal(before, torch.default_generator.get_state())


def test_nccl_takes_tensors_of_the_device_alone(gpu, tmp_path):
    with install_fake_nccl():
        dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(3, **C))
            for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
                with pytest.raises(DeviceMismatch, match="device type cpu"):
                    call(torch.ones(3))
            dist.all_reduce(torch.ones(3), group=dist.new_group(backend="gloo"))
        finally:
            dist.destroy_process_group()


def test_nothing_is_left_behind():
    available, generator = torch.cuda.is_available(), torch.Generator
    with PretendCuda():
        assert torch.Generator is not generator
    assert torch.cuda.is_available() == available
    assert torch.Generator is generator
