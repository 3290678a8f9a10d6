"""Smoothed, PCALocality and PatchPosterior against loops in float64 and quadrature, also at extreme noise levels."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from lit_knn.common.settings import describe
from lit_knn.estimators import Exact, PatchPosterior, PCALocality, Smoothed, Wiener
from lit_knn.estimators.patch_sizes import extent, power_spectrum
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from tests.any_data import all_images
from tests.toys import low_rank_vectors, noisy, pixels, rng

LEVELS = torch.tensor([1e-6, 0.02, 0.3, 1.0, 1.0, 5.0, 80.0, 1e4])
SHAPE = (2, 7, 6)


def latents(data, t=LEVELS):
    return noisy(data.gather(torch.arange(len(t)) % data.N), t)


def softmax_mean(z, x, t, values):
    """z (B, K), x (n, K), t (B,), values (n, V): the mean of values under the posterior of z over x."""
    sq_dist = (z.double()[:, None] - x).square().sum(2)
    return (-sq_dist / (2 * t.double()[:, None] ** 2)).softmax(1) @ values


# PCALocality


def assert_local(data, t, threshold):
    """Compare each pixel's mean with a loop, whose filter comes from an inverse."""
    z, x = latents(data, t), all_images(data).flatten(1).double()
    covariance, means = np.cov(x.T.numpy(), bias=True), []
    for row, level in zip(z.flatten(1), t.double(), strict=True):
        filters = np.abs(
            covariance @ np.linalg.inv(covariance + level.item() ** 2 * np.eye(data.d))
        )
        masks = torch.from_numpy(filters >= threshold * filters.max(1, keepdims=True))
        means.append(
            [
                softmax_mean(row[None, m], x[:, m], level[None], x[:, [p]])
                for p, m in enumerate(masks)
            ]
        )
    ours = PCALocality(threshold).bind(data).posterior_mean(z, t)
    torch.testing.assert_close(
        ours.flatten(1).double(), torch.tensor(means).double(), atol=1e-5, rtol=1e-5
    )
    return (ours - Exact().bind(data).posterior_mean(z, t)).abs().max()


@pytest.mark.parametrize(
    "data",
    [
        ReferenceSet(pixels(30, (3, 6, 5)), hflip=True),
        ReferenceSet(pixels(60, (1, 4, 6))),
        ReferenceSet(low_rank_vectors(40)),
    ],
    ids=["fewer images than pixels", "more images", "floats"],
)
def test_locality_equals_loops_over_pixels(data):
    t = torch.tensor([0.02, 0.3, 1.0, 1.0, 5.0, 80.0])
    assert assert_local(data, t, 0.05) > 0.01
    assert assert_local(data, t, 0.3) > 0.01


def test_locality_at_extreme_levels_and_of_one_image():
    assert_local(ReferenceSet(pixels(60, (1, 4, 6))), torch.tensor([1e-3, 0.5, 1e3]), 0.05)
    # With one image the covariance is 0, and so is every mask's threshold.
    one = ReferenceSet(pixels(1, (1, 4, 6)))
    z, x = latents(one), all_images(one).expand(len(LEVELS), -1, -1, -1)
    torch.testing.assert_close(
        PCALocality(0.05).bind(one).posterior_mean(z, LEVELS), x, atol=1e-5, rtol=0
    )


# Smoothed


def test_smoothed_mean_of_two_values_equals_quadrature():
    x, z, t, width = torch.tensor([[-1.0], [2.0]]), 0.7, 0.4, 0.5
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    near = torch.from_numpy(z + width * nodes)[:, None]
    expected = weights @ posterior_mean(near, x.double(), t).numpy()[:, 0] / math.sqrt(2 * math.pi)
    smoothed = Smoothed(Exact(), width, n=64).bind(ReferenceSet(x))
    means = smoothed.posterior_mean(torch.full((4000, 1), z), t, generator=rng()).double()
    error = means.std().item() / math.sqrt(4000)
    assert abs(means.mean().item() - expected) < 4 * error
    assert error < 2e-3
    alone = Exact().bind(ReferenceSet(x)).posterior_mean(torch.tensor([[z]]), t)
    assert abs(alone.item() - expected) > 0.05


def test_pair_is_exact_for_linear_estimate_at_each_items_level():
    reference = ReferenceSet(low_rank_vectors(40))
    z, linear = (
        latents(reference),
        Wiener(r=12).bind(reference).posterior_mean(latents(reference), LEVELS),
    )
    for n in (2, 4):
        ours = Smoothed(Wiener(r=12), 3.0, n=n).bind(reference).posterior_mean(z, LEVELS)
        # The sum of float32 numbers up to 1e5 at the largest level, whose means are of size 1.
        torch.testing.assert_close(ours, linear, rtol=1e-4, atol=1e-4)
    alone = Smoothed(Wiener(r=12), 3.0, n=3).bind(reference).posterior_mean(z, LEVELS)
    assert (alone - linear).abs().max() > 0.1


# PatchPosterior


def assert_patches(data, size, t=LEVELS, rows=slice(None)):
    """Compare with the mean over windows of the posterior mean of each."""
    z, x, t = latents(data, t)[rows], all_images(data).double(), t[rows]
    total, count = (
        torch.zeros_like(z, dtype=torch.float64),
        torch.zeros(z.shape[2:], dtype=torch.float64),
    )
    tops, lefts = (range(length - size + 1) for length in z.shape[2:])
    for top, left in product(tops, lefts):
        at = (..., slice(top, top + size), slice(left, left + size))
        own = x[at]
        total[at] += softmax_mean(z[at].flatten(1), own.flatten(1), t, own.flatten(1)).reshape(
            z[at].shape
        )
        count[at[1:]] += 1
    ours = PatchPosterior(size).bind(data).posterior_mean(z, t)
    torch.testing.assert_close(ours.double(), total / count, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize(
    "images", [pixels(40, SHAPE), 3 * torch.randn(40, *SHAPE, generator=rng()) + 1]
)
def test_patches_are_enumerated(images, hflip):
    data = ReferenceSet(images, hflip=hflip)
    for size in (1, 2, 3, 5):
        assert_patches(data, size)
    # At one level of much noise, all products are in float32.
    assert_patches(data, 3, rows=slice(6, 7))


def test_patches_as_wide_as_the_image_are_enumerated():
    assert_patches(ReferenceSet(pixels(7, (1, 5, 5))), 5)
    assert_patches(ReferenceSet(pixels(7, (2, 5, 8))), 5)
    assert_patches(ReferenceSet(pixels(1, (1, 6, 5))), 3)


def test_patches_that_differ_little_are_told_apart_far_from_0():
    # At this noise, products in float32 round the log weights by 0.1, which moves the mean by 1e-4.
    images = pixels(1, (1, 6, 5)).repeat(6, 1, 1, 1)
    images.view(6, -1)[torch.arange(1, 6), torch.arange(1, 6)] ^= 1
    assert_patches(ReferenceSet(images / 127.5 + 2), 3, t=torch.tensor([0.003, 0.005]))


def test_a_table_gives_the_size_of_the_nearest_level_in_log_t():
    data, t = ReferenceSet(pixels(40, SHAPE)), torch.tensor([0.01, 0.9, 1.1, 50.0])
    z = latents(data, t)
    ours = PatchPosterior({0.1: 1, 10.0: 5}).bind(data).posterior_mean(z, t)
    small, large = (PatchPosterior(size).bind(data).posterior_mean(z, t) for size in (1, 5))
    torch.testing.assert_close(ours, torch.cat([small[:2], large[2:]]), atol=1e-6, rtol=0)
    # An option may change after the construction.
    for changed, name, value, made in (
        (PatchPosterior(1).bind(data), "size", 5, PatchPosterior(5)),
        (PCALocality(0.02).bind(data), "threshold", 0.5, PCALocality(0.5)),
    ):
        before = changed.posterior_mean(z, 0.9)
        setattr(changed, name, value)
        found = (changed.bind(data) if name == "size" else changed).posterior_mean(z, 0.9)
        assert torch.equal(found, made.bind(data).posterior_mean(z, 0.9))
        assert not torch.equal(found, before)
    assert describe(PatchPosterior({0.1: 1, 10.0: 5})) != describe(
        PatchPosterior({0.1: 3, 10.0: 5})
    )


def sizes(images):
    return PatchPosterior().bind(ReferenceSet(images)).sizes_in_use


def test_sizes_are_those_of_known_fields(monkeypatch):
    # The levels lie around the deviation of a pixel. Of pixels that are all alike, many tell more at much noise.
    alike = sizes(3 * torch.randn(400, 1, 1, 1, generator=rng()).expand(-1, 2, 8, 8))
    images = pixels(200, (3, 16, 16))
    table, spectrum = (
        sizes(images),
        power_spectrum((images / 127.5 - 1).double() - (images / 127.5 - 1).double().mean(0)),
    )
    smooth = [*table.values()]
    # Less noise never needs a larger patch.
    assert table == {
        own: min(16, *(extent(spectrum, t) for t in table if t >= own)) for own in table
    }
    # two standard errors of 400 numbers
    assert math.sqrt(min(alike) * max(alike)) == pytest.approx(3, rel=0.1)
    assert alike[max(alike)] == 8
    assert smooth[0] < 8 < smooth[-1]
    assert set(sizes(torch.zeros(20, 1, 8, 8)).values()) == {8}  # the cheapest of equal means
    # A subset comes from the whole set.
    monkeypatch.setattr("lit_knn.estimators.patch_sizes.SPECTRUM_IMAGES", 50)
    grey = torch.full((50, 3, 16, 16), 127, dtype=torch.uint8)
    assert min(sizes(torch.cat([grey, images])).values()) == smooth[0]


@pytest.mark.parametrize("t", [0.1, 0.3, 1.0, 3.0, 10.0])
def test_a_window_keeps_nine_tenths_of_the_gain_of_the_filter(t):
    # By matrices on a torus of 12 x 12 pixels, whose covariance falls by a fifth with each step.
    at = torch.cartesian_prod(torch.arange(12), torch.arange(12))
    steps = (at[:, None] - at).abs()
    steps = torch.minimum(steps, 12 - steps)
    covariance = 0.8 ** steps.sum(2).double()
    row = torch.linalg.solve(covariance + t**2 * torch.eye(144), covariance)[0]

    def error(own):
        return 1 - 2 * own @ covariance[0] + own @ (covariance + t**2 * torch.eye(144)) @ own

    def gain(own):
        return t**2 / (1 + t**2) - error(own)

    wide_enough = (
        p for p in (1, 3, 5, 7, 9) if gain(row * (steps[0].amax(1) <= p // 2)) >= 0.9 * gain(row)
    )
    assert extent(torch.fft.fft2(covariance[0].view(1, 12, 12)).real, t) == next(wide_enough, 11)


def test_spectra_are_those_of_the_principal_colours():
    mix = torch.tensor([[1.0, 0.9, 0.2], [0, 0.5, 0.7], [0, 0, 0.3]], dtype=torch.float64)
    noise = torch.randn(64, 3, 6, 6, dtype=torch.float64, generator=rng(0))
    x = torch.einsum("cd,ndhw->nchw", mix, noise)
    variances = torch.linalg.eigvalsh(torch.einsum("nchw,ndhw->cd", x, x) / (64 * 36))
    # Parseval: the mean of a spectrum is the variance.
    torch.testing.assert_close(power_spectrum(x).mean((1, 2)).sort().values, variances)
