"""PatchPosterior against enumeration in float64, their limits, shifts, memory and refusals."""

from itertools import product

import pytest
import torch

from lit_knn.common.settings import describe
from lit_knn.estimators import (
    ByClass,
    PatchPosterior,
    patch_posterior,
)
from lit_knn.estimators.patch_sizes import extent, power_spectrum
from lit_knn.reference import ReferenceSet
from tests.toys import noisy, pixels

N, SHAPE = 40, (2, 7, 6)
LEVELS = torch.tensor([1e-6, 0.01, 0.1, 0.4, 1.0, 3.0, 20.0, 1e4])


def reference(N=N, shape=SHAPE, **options):
    return ReferenceSet(pixels(N, shape), **options)


def latents(data, t=LEVELS):
    return noisy(data.gather(torch.arange(len(t)) % data.N), t)


def all_of(data):
    return data.gather(torch.arange(data.N)).double()


def softmax_mean(z, x, t, values):
    """z (B, K), x (n, K), t (B,), values (n, V): the mean of values under the posterior of z over x."""
    sq_dist = (z.double()[:, None] - x).square().sum(2)
    return (-sq_dist / (2 * t.double()[:, None] ** 2)).softmax(1) @ values


def enumerated_at_one_position(z, x, t, size, stride=1):
    total, count = torch.zeros_like(z, dtype=torch.float64), torch.zeros(z.shape[2:], dtype=torch.float64)
    tops, lefts = ({*range(0, length - size + 1, stride), length - size} for length in z.shape[2:])
    for top, left in product(tops, lefts):
        at = (..., slice(top, top + size), slice(left, left + size))
        own = x[at]
        total[at] += softmax_mean(z[at].flatten(1), own.flatten(1), t, own.flatten(1)).reshape(z[at].shape)
        count[at[1:]] += 1
    return total / count


@pytest.mark.parametrize("images", ["uint8", "float"])
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_patches_of_one_position_are_enumerated(size, hflip, images):
    data = reference(hflip=hflip) if images == "uint8" else ReferenceSet(3 * torch.randn(N, *SHAPE) + 1, hflip=hflip)
    z = latents(data)
    for stride in {1, size}:
        ours = PatchPosterior(size, stride).bind(data).posterior_mean(z, LEVELS)
        expected = enumerated_at_one_position(z, all_of(data), LEVELS, size, stride)
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 5, 5), (2, 5, 8)])
def test_patches_as_wide_as_the_image_are_enumerated(shape):
    data = reference(N=7, shape=shape)
    z = latents(data)
    for rows in (slice(None), slice(3, 4)):
        ours = PatchPosterior(5).bind(data).posterior_mean(z[rows], LEVELS[rows])
        expected = enumerated_at_one_position(z[rows], all_of(data), LEVELS[rows], 5)
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)


def test_windows_far_apart_are_enumerated():
    data = reference(N=9, shape=(1, 11, 10))
    z = latents(data)
    for size, stride in ((4, 3), (5, 4), (7, 7)):
        ours = PatchPosterior(size, stride).bind(data).posterior_mean(z, LEVELS)
        expected = enumerated_at_one_position(z, all_of(data), LEVELS, size, stride)
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)


def test_a_table_gives_the_size_of_the_nearest_level_in_log_t():
    data = reference()
    t = torch.tensor([0.01, 0.9, 1.1, 50.0])
    z = latents(data, t)
    ours = PatchPosterior({0.1: 1, 10.0: 5}).bind(data).posterior_mean(z, t)
    small, large = (PatchPosterior(size).bind(data).posterior_mean(z, t) for size in (1, 5))
    torch.testing.assert_close(ours, torch.cat([small[:2], large[2:]]), atol=1e-6, rtol=0)
    assert describe(PatchPosterior({0.1: 1, 10.0: 5})) != describe(PatchPosterior({0.1: 3, 10.0: 5}))


def test_pieces_of_any_size_give_the_same_mean(monkeypatch):
    data, estimator = reference(), PatchPosterior(3)
    whole = estimator.bind(data).posterior_mean(latents(data), LEVELS)
    monkeypatch.setattr(patch_posterior, "STATE_BYTES", 1)
    monkeypatch.setattr(patch_posterior, "ITEMS", 3)
    monkeypatch.setattr(patch_posterior, "work_bytes", lambda device: 20_000)
    torch.testing.assert_close(estimator.posterior_mean(latents(data), LEVELS), whole, atol=1e-6, rtol=0)


def test_each_class_has_its_own_patches():
    labels = torch.arange(N) % 2
    data = reference(labels=labels)
    z = latents(data)
    ours = ByClass(PatchPosterior(3)).bind(data).posterior_mean(z, LEVELS, labels=labels[: len(z)])
    odd = PatchPosterior(3).bind(ReferenceSet(pixels(N, SHAPE)[1::2])).posterior_mean(z, LEVELS)
    torch.testing.assert_close(ours[1::2], odd[1::2], atol=1e-6, rtol=0)


def test_extents_are_those_of_a_known_field():
    # White noise has no neighbours to look at. A constant field needs all of them at much noise.
    white = power_spectrum(torch.randn(400, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double())
    assert white.mean().item() == pytest.approx(1, rel=0.02)
    flat = power_spectrum(
        torch.randn(400, 1, 1, 1, generator=torch.Generator().manual_seed(0)).double().expand(-1, 2, 8, 8)
    )
    smooth = pixels(200, (3, 16, 16)).double() / 127.5 - 1
    spectrum = power_spectrum(smooth - smooth.mean(0))
    sizes = [extent(spectrum, t) for t in (0.3, 1.0, 3.0, 10.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert extent(flat, 100.0) > 8


@pytest.mark.parametrize("number", [1, 60])
def test_extreme_levels_are_enumerated_in_float32(number):
    data = ReferenceSet(pixels(number, (1, 6, 5)))
    t = torch.tensor([1e-3, 0.5, 1e3])
    z = latents(data, t)
    # At one level of much noise, all products are in float32.
    for own in (t, *t[:, None]):
        found = PatchPosterior(3).bind(data).posterior_mean(z[-len(own) :], own)
        expected = enumerated_at_one_position(z[-len(own) :], all_of(data), own, 3)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_images_that_differ_little_are_told_apart_far_from_0():
    # At this noise, products in float32 round the log weights by 0.1, which moves the mean by 1e-4.
    images = pixels(1, (1, 6, 5)).repeat(6, 1, 1, 1)
    images.view(6, -1)[torch.arange(1, 6), torch.arange(1, 6)] ^= 1
    data, t = ReferenceSet(images / 127.5 + 2), torch.tensor([0.003, 0.005])
    z = latents(data, t)
    found = PatchPosterior(3).bind(data).posterior_mean(z, t)
    torch.testing.assert_close(found.double(), enumerated_at_one_position(z, all_of(data), t, 3), atol=1e-5, rtol=0)
