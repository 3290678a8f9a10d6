"""The exact mean by integer products against the sum in float64."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.estimators import ByClass, Exact, ExactFloat64, ExactInt8, digit_sums, enough_digits
from lit_knn.estimators.float_sums import float_sums
from lit_knn.linalg.dtypes import is_native
from lit_knn.reference import ReferenceSet
from lit_knn.reference.sharded import ShardedReferenceSet
from lit_knn.theory.posterior import posterior_mean
from tests.toys import pixels, two_groups

pytestmark = pytest.mark.skipif(
    not is_native(torch.int8, torch.device("cpu")), reason="this CPU does not multiply int8 natively"
)


@pytest.mark.parametrize(("digits", "limit"), [(3, 1e-13), (2, 1e-10), (1, 1e-5)])
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("t", [0.002, 0.05, 0.5, 2.0, 10.0, 80.0])
def test_each_digit_brings_the_error_down(t, hflip, digits, limit):
    reference = ReferenceSet(pixels(N=400), hflip=hflip)
    generator = torch.Generator().manual_seed(1)
    x = reference.gather(torch.arange(30))
    z = x + t * torch.randn(x.shape, generator=generator)
    expected = posterior_mean(z, reference.gather(torch.arange(reference.N)), t)
    for given in (z, z.double()):
        estimate = ExactInt8(digits).bind(reference).posterior_mean(given, t)
        # Rounding the mean to float32 already gives an error of 1e-15.
        assert (estimate.double() - expected).square().mean() < limit + 1e-15


def test_chunks_and_batches_make_no_difference(monkeypatch):
    reference = ReferenceSet(pixels(N=300))
    z = torch.randn(20, *reference.shape) * 3
    whole = ExactInt8().bind(reference).posterior_mean(z, 2.0)
    monkeypatch.setattr(digit_sums, "CHUNK", 64)
    monkeypatch.setattr(digit_sums, "SCORE_BYTES", 4 * 300 * 3)
    torch.testing.assert_close(ExactInt8().bind(reference).posterior_mean(z, 2.0), whole, rtol=1e-5, atol=1e-5)


def test_each_latent_has_its_own_noise_level():
    reference = ReferenceSet(pixels(N=300))
    z, t = torch.randn(6, *reference.shape), torch.tensor([0.01, 0.1, 1.0, 3.0, 20.0, 80.0])
    expected = posterior_mean(z, reference.gather(torch.arange(300)), t)
    estimate = Exact().bind(reference).posterior_mean(z, t)
    torch.testing.assert_close(estimate.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("t", [1e-30, 1e30])
def test_levels_that_digit_sums_cannot_hold_have_the_limits_of_the_noise(t):
    reference = ReferenceSet(pixels(N=60))
    z = reference.gather(torch.arange(5))
    limit = z if t < 1 else reference.mean().reshape(1, *reference.shape).expand_as(z)
    torch.testing.assert_close(Exact().bind(reference).posterior_mean(z, t), limit)


def test_floats_are_refused_by_int8_and_summed_in_float64_by_auto():
    reference = ReferenceSet(torch.randn(40, 6))
    with pytest.raises(InputError, match=r"ExactInt8: needs uint8 images .* got torch\.float32 on cpu"):
        ExactInt8().bind(reference)
    z = torch.randn(5, 6)
    auto, plain = (kind().bind(reference).posterior_mean(z, 1.0) for kind in (Exact, ExactFloat64))
    assert torch.equal(auto, plain)
    with pytest.raises(InputError, match="digits must be at most 4, got 20"):
        ExactInt8(20)


@pytest.mark.parametrize("N", [1, 2, 31])
def test_fewer_images_than_are_recomputed(N):
    reference = ReferenceSet(pixels(N=N))
    z = torch.randn(4, *reference.shape)
    expected = posterior_mean(z, reference.gather(torch.arange(N)), 1.0)
    estimate = ExactInt8().bind(reference).posterior_mean(z, 1.0)
    torch.testing.assert_close(estimate.double(), expected, rtol=1e-5, atol=1e-5)


def test_sums_of_many_products_do_not_overflow():
    # d · 127² is more than 2^31.
    images = torch.full((40, 3, 256, 256), 60, dtype=torch.uint8)
    images[0] = 255
    reference = ReferenceSet(images)
    x = reference.gather(torch.tensor([0]))
    z = x + 0.01 * torch.randn(x.shape)
    torch.testing.assert_close(ExactInt8().bind(reference).posterior_mean(z, 0.01), x)


def test_more_copies_of_an_image_than_are_recomputed():
    # At small t the product's rounding is a factor of e^100 or more, but the same for all copies.
    images = torch.randint(256, (60, 3, 64, 64), dtype=torch.uint8)
    images[:50] = 255
    reference = ReferenceSet(images)
    x = reference.gather(torch.arange(8))
    for t in (5e-4, 0.002):
        z = x + t * torch.randn(x.shape)
        torch.testing.assert_close(ExactInt8().bind(reference).posterior_mean(z, t), x)


@pytest.mark.parametrize(("images", "digits"), [(pixels(N=400), 2), (two_groups(), 3)], ids=["smooth", "two groups"])
def test_the_images_at_hand_decide_how_many_digits_are_taken(images, digits):
    reference = ReferenceSet(images)
    estimator = Exact().bind(reference)
    assert estimator.digits_in_use == digits
    # The promised error holds for other latents, too, and one digit less breaks it.
    x = reference.gather(torch.arange(100))
    worst = {}
    for count in (digits, digits - 1):
        estimate = ExactInt8(count).bind(reference)
        worst[count] = 0.0
        for t in torch.logspace(-1.5, 2, 15).tolist():
            z = x + t * torch.randn(x.shape)
            error = estimate.posterior_mean(z, t).double() - ExactFloat64().bind(reference).posterior_mean(
                z.double(), t
            )
            worst[count] = max(worst[count], error.square().flatten(1).mean(1).mean().item())
    assert worst[digits] < 1e-9 / 3
    assert worst[digits - 1] > 1e-9 / 10


def test_float64_is_taken_where_no_number_of_digits_is_exact_enough(monkeypatch):
    reference, z = ReferenceSet(pixels(N=100)), torch.randn(5, 3, 6, 6)
    monkeypatch.setattr(enough_digits, "LARGEST_SQ_ERROR", 1e-40)
    estimator = Exact().bind(reference)
    assert estimator.digits_in_use is None
    assert torch.equal(estimator.posterior_mean(z, 1.0), ExactFloat64().bind(reference).posterior_mean(z, 1.0))
    # The user asked for ExactInt8, so it stays.
    assert ExactInt8().bind(reference).digits_in_use == 3


def test_the_choice_is_the_same_each_time_and_touches_no_random_numbers():
    reference = ReferenceSet(two_groups(N=90))
    before = torch.get_rng_state()
    chosen = {Exact().bind(reference).digits_in_use for _ in range(3)}
    assert len(chosen) == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert Exact().bind(ReferenceSet(two_groups()[:1])).digits_in_use == 2


def test_a_large_set_is_judged_by_a_part_of_it(monkeypatch):
    seen = []

    def watched(reference, *args):
        seen.append(reference.N)
        return float_sums(reference, *args)

    monkeypatch.setattr(enough_digits, "float_sums", watched)
    monkeypatch.setattr(enough_digits, "SUBSET_VALUES", 120 * 192)
    for hflip in (False, True):
        assert Exact().bind(ReferenceSet(two_groups(N=500), hflip=hflip)).digits_in_use == 3
    assert seen == [120, 240]


def test_what_only_many_images_together_weigh_is_not_lost():
    # Each of 20,000 images has at most 1/30,000 of the largest weight. Weights in two digits would give errors of 1e-6.
    images = torch.randint(100, 102, (20_000, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:40] = 20
    reference = ReferenceSet(images)
    x, t = reference.gather(torch.arange(20_000)), torch.full((2,), 0.25, dtype=torch.float64)
    z = torch.cat([torch.lerp(x[:1], x[100:101], share) for share in (0.38, 0.40)])
    assert (
        torch.softmax(-torch.cdist(z.flatten(1), x.flatten(1)).square() / (2 * 0.25**2), 1)[:, 40:].sum(1) > 2e-3
    ).all()
    error = ExactInt8(3).bind(reference).posterior_mean(z.double(), t) - posterior_mean(z, x, t)
    assert error.square().mean() < 1e-10


def test_shards_agree_on_the_digits_and_a_class_has_its_own():
    images = torch.cat([two_groups(N=200), pixels(N=200, shape=(3, 8, 8))])
    labels = torch.arange(400) // 200
    assert Exact().bind(ShardedReferenceSet(images)).digits_in_use == 3
    by_class = ByClass(Exact()).bind(ReferenceSet(images, labels=labels))
    assert [by_class.parts[label].digits_in_use for label in (0, 1)] == [3, 2]


GROWTH = """
import torch
from lit_knn.linalg.int8 import half_sq_norms

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
