"""The exact mean by integer products against the sum in float64."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_knn.compute import is_native
from lit_knn.errors import InputError
from lit_knn.estimators import Exact
from lit_knn.posterior import posterior_mean
from lit_knn.reference import ReferenceSet
from tests.test_torch_index import pixels

pytestmark = pytest.mark.skipif(
    not is_native(torch.int8, torch.device("cpu")), reason="this CPU does not multiply int8 natively"
)


@pytest.mark.parametrize(("digits", "limit"), [(3, 1e-11), (2, 1e-7)])
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("t", [0.002, 0.05, 0.5, 2.0, 10.0, 80.0])
def test_three_digits_are_float32_and_two_are_nearly(t, hflip, digits, limit):
    reference = ReferenceSet(pixels(N=400), hflip=hflip)
    generator = torch.Generator().manual_seed(1)
    x = reference.gather(torch.arange(30))
    z = x + t * torch.randn(x.shape, generator=generator)
    expected = posterior_mean(z, reference.gather(torch.arange(reference.N)), t)
    estimate = Exact("int8", digits).bind(reference).posterior_mean(z.double(), t)
    assert (estimate - expected).square().mean() < limit


def test_chunks_and_batches_make_no_difference(monkeypatch):
    reference = ReferenceSet(pixels(N=300))
    z = torch.randn(20, *reference.shape) * 3
    whole = Exact("int8").bind(reference).posterior_mean(z, 2.0)
    monkeypatch.setattr("lit_knn.estimators.integer_sums.CHUNK", 64)
    monkeypatch.setattr("lit_knn.estimators.integer_sums.SCORE_BYTES", 4 * 300 * 3)
    torch.testing.assert_close(Exact("int8").bind(reference).posterior_mean(z, 2.0), whole, rtol=1e-5, atol=1e-5)


def test_each_latent_has_its_own_noise_level():
    reference = ReferenceSet(pixels(N=300))
    z, t = torch.randn(6, *reference.shape), torch.tensor([0.01, 0.1, 1.0, 3.0, 20.0, 80.0])
    expected = posterior_mean(z, reference.gather(torch.arange(300)), t)
    estimate = Exact("auto").bind(reference).posterior_mean(z, t)
    torch.testing.assert_close(estimate.double(), expected, rtol=1e-4, atol=1e-5)


def test_floats_are_refused_by_int8_and_summed_in_float64_by_auto():
    reference = ReferenceSet(torch.randn(40, 6))
    with pytest.raises(InputError, match=r"compute=int8 needs uint8 images .* got torch\.float32 on cpu"):
        Exact("int8").bind(reference)
    z = torch.randn(5, 6)
    auto, plain = (Exact(compute).bind(reference).posterior_mean(z, 1.0) for compute in ("auto", "float64"))
    assert torch.equal(auto, plain)
    with pytest.raises(InputError, match="compute='bf16' must be float64, int8 or auto"):
        Exact("bf16")
    with pytest.raises(InputError, match="digits must be at most 4, got 20"):
        Exact("int8", digits=20)


@pytest.mark.parametrize("N", [1, 2, 31])
def test_fewer_images_than_are_recomputed(N):
    reference = ReferenceSet(pixels(N=N))
    z = torch.randn(4, *reference.shape)
    expected = posterior_mean(z, reference.gather(torch.arange(N)), 1.0)
    estimate = Exact("int8").bind(reference).posterior_mean(z, 1.0)
    torch.testing.assert_close(estimate.double(), expected, rtol=1e-5, atol=1e-5)


def test_sums_of_many_products_do_not_overflow():
    # d · 127² is more than 2^31.
    images = torch.full((40, 3, 256, 256), 60, dtype=torch.uint8)
    images[0] = 255
    reference = ReferenceSet(images)
    x = reference.gather(torch.tensor([0]))
    z = x + 0.01 * torch.randn(x.shape)
    torch.testing.assert_close(Exact("int8").bind(reference).posterior_mean(z, 0.01), x)


def test_more_copies_of_an_image_than_are_recomputed():
    # At small t the rounding of the product is a factor of e^100 and more, the same for all copies.
    images = torch.randint(256, (60, 3, 64, 64), dtype=torch.uint8)
    images[:50] = 255
    reference = ReferenceSet(images)
    x = reference.gather(torch.arange(8))
    for t in (5e-4, 0.002):
        z = x + t * torch.randn(x.shape)
        torch.testing.assert_close(Exact("int8").bind(reference).posterior_mean(z, t), x)


GROWTH = """
import torch
from lit_knn.quantised import half_sq_norms

def held():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) // 1024

values = torch.zeros(12_000, 12_288, dtype=torch.int8)
# Freeing a large block lets the C library keep blocks of up to that size in its heap.
del (block := [torch.empty(30 * 2**20, dtype=torch.uint8)])[0]
before = held()
norms = half_sq_norms(values.split(8192))
print(held() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what a process holds")
def test_norms_do_not_leave_a_float_copy_of_the_vectors_in_the_heap():
    # All vectors as float32 are 563 MiB.
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150
