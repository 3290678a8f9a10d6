"""The stand-in GPU passes what CUDA accepts, flags what CUDA refuses, and counts waits."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests import ROOT
from tests.pretend_cuda import (
    DeviceMismatch,
    PretendCuda,
    PretendTensor,
    install_fake_nccl,
    real,
)


@pytest.fixture
def gpu():
    with PretendCuda() as gpu:
        yield gpu


C = {"device": "cuda"}


def g(device):
    return torch.Generator(device).manual_seed(0)


BAD = {
    "add": lambda: torch.randn(3, **C) + torch.randn(3),
    "inplace into cpu": lambda: torch.randn(3).add_(torch.randn(3, **C)),
    "inplace 0-dim cpu += cuda": lambda: torch.tensor(1.0).add_(torch.tensor(1.0, **C)),
    "mm": lambda: torch.randn(3, 3, **C) @ torch.randn(3, 3),
    "cat": lambda: torch.cat([torch.randn(3, **C), torch.randn(3)]),
    "where branch": lambda: torch.where(torch.ones(3, dtype=torch.bool, **C), torch.zeros(3), torch.ones(3, **C)),
    "index_select cpu index": lambda: torch.randn(3, **C).index_select(0, torch.tensor([0])),
    "cpu tensor by cuda index": lambda: torch.randn(3)[torch.tensor([0], **C)],
    "setitem cpu value": lambda: torch.randn(3, **C).__setitem__(torch.tensor([0, 1], **C), torch.zeros(2)),
    "index_add_ cpu index": lambda: torch.zeros(3, **C).index_add_(0, torch.tensor([0]), torch.ones(1, **C)),
    "scatter_ cpu src": lambda: torch.zeros(3, **C).scatter_(0, torch.tensor([0], **C), torch.ones(1)),
    "searchsorted": lambda: torch.searchsorted(torch.arange(3.0), torch.rand(2, **C)),
    "masked_fill cpu mask": lambda: torch.randn(3, **C).masked_fill(torch.ones(3, dtype=torch.bool), 0.0),
    "embedding": lambda: F.embedding(torch.tensor([0]), torch.randn(3, 2, **C)),
    "linear weights on cpu": lambda: nn.Linear(2, 2)(torch.randn(1, 2, **C)),
    "einsum": lambda: torch.einsum("ij,jk", torch.randn(2, 2, **C), torch.randn(2, 2)),
    "randn cpu generator": lambda: torch.randn(3, generator=g("cpu"), **C),
    "randperm cpu generator": lambda: torch.randperm(3, generator=g("cpu"), **C),
    "multinomial cpu generator": lambda: torch.multinomial(torch.ones(3, **C), 2, generator=g("cpu")),
    "nextafter cpu scalar": lambda: torch.nextafter(torch.randn(3, **C), torch.tensor(1.0)),
    "lerp cpu": lambda: torch.lerp(torch.zeros(3, **C), torch.zeros(3), 0.5),
    "int_mm 16 rows": lambda: torch._int_mm(
        torch.zeros(16, 8, dtype=torch.int8, **C), torch.zeros(8, 8, dtype=torch.int8, **C)
    ),
    "int_mm odd": lambda: torch._int_mm(
        torch.zeros(17, 8, dtype=torch.int8, **C), torch.zeros(8, 9, dtype=torch.int8, **C)
    ),
    "int_mm of rows": lambda: torch._int_mm(
        torch.zeros(17, 8, dtype=torch.int8, **C), torch.zeros(8, 16, dtype=torch.int8, **C)
    ),
    "an operation without a CUDA kernel": lambda: torch.histogram(torch.zeros(3, **C), 2),
    "mm out_dtype double": lambda: torch.mm(
        torch.zeros(2, 2, **C).bfloat16(), torch.zeros(2, 2, **C).bfloat16(), out_dtype=torch.float64
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cuda_refuses_is_flagged(gpu, name):
    with pytest.raises((DeviceMismatch, RuntimeError)) as info:
        BAD[name]()
    assert isinstance(info.value, DeviceMismatch), info.value


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x.numpy(),
        np.asarray,
        lambda x: np.array(x) + 1,
        lambda x: torch.from_numpy(np.zeros(3)) + np.asarray(x),
    ],
)
def test_numpy_of_a_cuda_tensor_is_refused_by_pytorch_itself(gpu, how):
    with pytest.raises((TypeError, RuntimeError)):
        how(torch.randn(3, **C))


def _assign():
    x = torch.zeros(3, **C)
    x[1] = torch.tensor(2.0)
    x[torch.tensor([True, False, False])] = 5.0
    return x


GOOD = {
    "cpu scalar tensor": lambda: torch.randn(3, **C) * torch.tensor(2.0),
    "cpu scalar first": lambda: torch.tensor(2.0) * torch.randn(3, **C),
    "python number": lambda: torch.randn(3, **C) + 1,
    "where scalars": lambda: torch.where(torch.ones(3, dtype=torch.bool, **C), torch.tensor(1.0), torch.zeros(3, **C)),
    "where numbers": lambda: torch.where(torch.ones(3, dtype=torch.bool, **C), 1.0, torch.zeros(3, **C)),
    "cpu index": lambda: torch.randn(3, **C)[torch.tensor([0, 2])],
    "cpu mask": lambda: torch.randn(3, **C)[torch.tensor([True, False, True])],
    "assign": _assign,
    "copy_ across": lambda: torch.zeros(3, **C).copy_(torch.ones(3)),
    "slice assign across": lambda: torch.zeros(3, **C).__setitem__(slice(0, 2), torch.ones(2)),
    "generators": lambda: torch.randn(3, generator=g("cuda"), **C) + torch.randn(3, generator=g("cpu")).cuda(),
    "to and back": lambda: torch.randn(3).to("cuda").cpu() + torch.randn(3),
    "masked_fill 0-dim": lambda: torch.randn(3, **C).masked_fill(
        torch.ones(3, dtype=torch.bool, **C), torch.tensor(0.0)
    ),
    "split, unbind, iterate": lambda: [a + 1 for a in torch.zeros(4, 2, **C).split(2)] + list(torch.zeros(2, **C)),
    "int_mm": lambda: torch._int_mm(
        torch.zeros(17, 8, dtype=torch.int8, **C), torch.zeros(16, 8, dtype=torch.int8, **C).T
    ),
    "mm out_dtype": lambda: torch.mm(
        torch.ones(2, 2, **C).bfloat16(), torch.ones(2, 2, **C).bfloat16(), out_dtype=torch.float32
    ),
    "svd_lowrank": lambda: torch.svd_lowrank(torch.randn(8, 6, **C), q=3),
    "tensor from list": lambda: torch.tensor([1, 2], **C) + torch.as_tensor(np.arange(2), **C),
    "searchsorted": lambda: torch.searchsorted(torch.arange(3.0, **C), torch.rand(2, **C)),
    "autocast": lambda: torch.mm(torch.ones(2, 2, **C), torch.ones(2, 2, **C)),
    "pad, sort, topk": lambda: F.pad(torch.rand(3, 4, **C), (0, 1)).sort(1).values.topk(2, dim=1),
    "meta": lambda: torch.zeros(3, device="meta") + 1,
}


@pytest.mark.parametrize("name", GOOD)
def test_what_cuda_accepts_passes(gpu, name):
    GOOD[name]()


def test_the_tensor_says_that_it_is_on_the_gpu(gpu):
    x = torch.zeros(2, 3, **C)
    assert isinstance(x, PretendTensor)
    assert x.is_cuda
    assert x.device == torch.device("cuda:0")
    assert x.device.type == "cuda"
    assert x.T.device.type == x[0].device.type == x.flatten()[1:].device.type == "cuda"
    assert not x.cpu().is_cuda
    assert type(x.cpu()) is torch.Tensor
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert g("cuda").device == torch.device("cuda:0")
    assert isinstance(torch.default_generator, torch.Generator)


def test_values_views_and_writes_are_those_of_the_cpu(gpu):
    x = torch.arange(12.0, **C).view(3, 4)
    x[1] += 1
    x[:, 2].mul_(2)
    x.T[0, 2] = -1
    want = torch.arange(12.0).view(3, 4)
    want[1] += 1
    want[:, 2].mul_(2)
    want.T[0, 2] = -1
    assert torch.equal(real(x), want)
    x.squeeze_().unsqueeze_(0)
    assert x.shape == (1, 3, 4)
    assert torch.equal(x.cpu(), want[None])


SYNCS = {
    "item": (lambda x: x.sum().item(), 1),
    "bool": (lambda x: bool((x > 0).any()), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "mask": (lambda x: x[x > 0], 1),
    "mask assign number": (lambda x: x.__setitem__(x > 0, 1.0), 0),
    "mask assign tensor": (lambda x: x.__setitem__(x > 9, torch.zeros(0, **C)), 1),
    "unique": (lambda x: x.unique(), 1),
    "from cpu": (lambda x: x + torch.ones(3).cuda(), 1),
    "from cpu, not blocking": (lambda x: x + torch.ones(3).to("cuda", non_blocking=True), 0),
    "arithmetic": (lambda x: (x * 2 + 1).sum().exp(), 0),
    "cpu scalar": (lambda x: x * torch.tensor(2.0), 0),
    "cpu index": (lambda x: x[torch.tensor([0])], 1),
    "multinomial with replacement": (lambda x: torch.multinomial(x.abs() + 1, 2, replacement=True), 0),
    "multinomial without": (lambda x: torch.multinomial(x.abs() + 1, 2), 1),
    "eigh": (lambda x: torch.linalg.eigh(x[:, None] * x), 1),
    "repeat_interleave": (lambda x: x.repeat_interleave(torch.tensor([1, 2, 3], **C)), 2),
    "printing": (lambda x: f"{x.max():.3f}", 1),
    "synchronize": (lambda x: torch.cuda.synchronize(), 1),
}


@pytest.mark.parametrize("name", SYNCS)
def test_synchronisations_are_counted(gpu, name):
    run, count = SYNCS[name]
    with torch.inference_mode():
        x = torch.ones(3, **C)
        with gpu.record() as seen:
            run(x)
    assert seen.syncs == count, seen.report()


@torch.library.custom_op("lit_knn_tests::scaled_sum", mutates_args=(), device_types="cpu")
def scaled_sum(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return x * scale + y


@scaled_sum.register_kernel("cuda")
def _(x, y, scale):
    raise AssertionError("the stand-in has no data pointers of a GPU")


@torch.library.custom_op("lit_knn_tests::add_one_", mutates_args=("x",), device_types="cpu")
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_custom_operator_runs_its_cpu_implementation(gpu, mode):
    with mode():
        x, y = torch.ones(8, **C), torch.arange(8.0, **C)
        with gpu.record() as seen:
            out = scaled_sum(x, y, 2.0)
            add_one_(x)
        assert out.is_cuda
        assert real(out).tolist() == [2.0 + i for i in range(8)]
        assert real(x).tolist() == [2.0] * 8
        assert seen.syncs == 0
        with pytest.raises(DeviceMismatch):
            scaled_sum(x, torch.ones(8), 2.0)


def test_a_site_is_the_line_of_the_project():
    with PretendCuda(project=ROOT) as gpu, gpu.record() as seen:
        torch.ones(3, **C).softmax(0).tolist()
    ((_, site),) = seen.sync_sites
    assert site.startswith("tests/gpu/test_pretend_cuda.py:")


def test_a_network_trains_as_on_the_cpu(gpu):
    def train(device):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 1)
        )
        net = copy.deepcopy(net.to(device)).to(device)
        optimizer = torch.optim.RAdam(net.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 32).view(2, 1, 4, 4).to(device)
        for _ in range(8):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    for ours, theirs in zip(train("cuda"), train("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_draws_from_the_stream_of_the_device(gpu):
    x = torch.ones(1000, **C)
    torch.manual_seed(3)
    before = torch.default_generator.get_state()
    a = F.dropout(x, 0.5)
    assert torch.equal(before, torch.default_generator.get_state())  # the CPU's stream is untouched
    b = F.dropout(x, 0.5)
    torch.cuda.manual_seed(3)
    c = F.dropout(x, 0.5)
    assert torch.equal(real(a), real(c))
    assert not torch.equal(real(a), real(b))
    torch.default_generator.manual_seed(3)  # seeds the CPU alone
    assert not torch.equal(real(c), real(F.dropout(x, 0.5)))


def test_autocast_of_cuda_applies(gpu):
    a = torch.ones(2, 2, **C)
    with torch.autocast("cuda", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert a.exp().dtype == torch.float32
        with torch.autocast("cuda", enabled=False):
            assert (a @ a).dtype == torch.float32


def test_attention_runs(gpu):
    q = torch.randn(1, 2, 5, 4, **C).requires_grad_()
    F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert q.grad.is_cuda


def test_nccl_takes_tensors_of_the_device_alone(gpu, tmp_path):
    with install_fake_nccl():
        dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            x = torch.ones(3, **C)
            dist.all_reduce(x)
            dist.barrier()
            for call in (
                lambda: dist.all_reduce(torch.ones(3)),
                lambda: dist.broadcast(torch.ones(3), 0),
                lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
            ):
                with pytest.raises(DeviceMismatch, match="device type cpu"):
                    call()
            # Objects are sent as tensors on the device.
            with gpu.record() as seen:
                values = [None]
                dist.all_gather_object(values, {"a": 1})
            assert values == [{"a": 1}]
            assert seen.syncs > 0
            dist.all_reduce(torch.ones(3), group=dist.new_group(backend="gloo"))
        finally:
            dist.destroy_process_group()


def test_nothing_is_left_behind():
    available, generator = torch.cuda.is_available(), torch.Generator
    with PretendCuda():
        assert torch.Generator is not generator
    assert torch.cuda.is_available() == available
    assert torch.Generator is generator
