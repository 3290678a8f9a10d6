"""PatchPosterior against enumeration in float64, their limits, shifts, memory and refusals."""

from itertools import product

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.settings import describe
from lit_knn.estimators import (
    ByClass,
    Exact,
    PatchPosterior,
    patch_posterior,
    rounding,
)
from lit_knn.estimators.patch_posterior import sliding_sums
from lit_knn.estimators.patch_sizes import extent, power_spectrum
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, noisy, pixels

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


@pytest.mark.parametrize("t", [0.5, 1.0])
def test_row_products_in_float32_are_as_good_as_float64(t, monkeypatch):
    data = reference(N=20, shape=(3, 20, 20))
    z = latents(data, torch.full((2,), t))
    ours = PatchPosterior(15).bind(data).posterior_mean(z, t)
    monkeypatch.setattr(rounding, "MOST_ROUNDING", 0.0)
    torch.testing.assert_close(PatchPosterior(15).bind(data).posterior_mean(z, t), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", range(1, 10))
def test_sliding_sums_are_sums_of_windows(size):
    x = torch.arange(27.0).view(9, 3).square()
    expected = torch.stack([x[start : start + size].sum(0) for start in range(10 - size)])
    torch.testing.assert_close(sliding_sums(x, size), expected, atol=0, rtol=0)


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


def test_products_are_in_float32_only_where_they_round_little(monkeypatch):
    data, seen = reference(), set()
    weights_of = patch_posterior.weights_of

    def recorded(log_weights, maximum):
        seen.add(log_weights.dtype)
        return weights_of(log_weights, maximum)

    monkeypatch.setattr(patch_posterior, "weights_of", recorded)
    z = latents(data, torch.ones(2))
    for t, dtype in ((0.01, torch.float64), (1.0, torch.float32)):
        for levels in (t, torch.tensor([t, 1.0])):
            seen.clear()
            PatchPosterior(3).bind(data).posterior_mean(z, levels)
            assert seen == {dtype}


def test_a_patch_of_the_whole_image_gives_the_posterior_mean():
    data = reference()
    exact = Exact().bind(data).posterior_mean(latents(data), LEVELS)
    ours = PatchPosterior(7).bind(data).posterior_mean(latents(data), LEVELS)
    torch.testing.assert_close(ours, exact, atol=1e-6, rtol=0)


def test_one_image_is_the_mean_of_its_own_patches():
    data = reference(N=1)
    z = latents(data)
    for estimator in (PatchPosterior(3), PatchPosterior()):
        ours = estimator.bind(data).posterior_mean(z, LEVELS)
        torch.testing.assert_close(ours.double(), all_of(data).expand(z.shape), atol=1e-6, rtol=0)


def test_at_great_noise_patches_have_equal_weights():
    data = reference()
    z, x = latents(data, torch.full((4,), 1e4)), all_of(data)
    ours = PatchPosterior(3).bind(data).posterior_mean(0 * z, 1e4)
    torch.testing.assert_close(ours[0].double(), x.mean(0), atol=1e-6, rtol=0)


def test_at_no_noise_an_image_of_the_set_stays():
    data = reference()
    x = data.gather(torch.arange(5))
    torch.testing.assert_close(PatchPosterior(3).bind(data).posterior_mean(x, 1e-6), x, atol=1e-6, rtol=0)


def test_a_table_gives_the_size_of_the_nearest_level_in_log_t():
    data = reference()
    t = torch.tensor([0.01, 0.9, 1.1, 50.0])
    z = latents(data, t)
    ours = PatchPosterior({0.1: 1, 10.0: 5}).bind(data).posterior_mean(z, t)
    small, large = (PatchPosterior(size).bind(data).posterior_mean(z, t) for size in (1, 5))
    torch.testing.assert_close(ours, torch.cat([small[:2], large[2:]]), atol=1e-6, rtol=0)
    assert describe(PatchPosterior({0.1: 1, 10.0: 5})) != describe(PatchPosterior({0.1: 3, 10.0: 5}))


def test_latents_of_any_number_and_type():
    data = reference()
    estimator = PatchPosterior(3).bind(data)
    assert estimator.deterministic
    assert estimator.posterior_mean(torch.empty(0, *SHAPE), 1.0).shape == (0, *SHAPE)
    half = latents(data, torch.full((1,), 1.0)).half()
    mean = estimator.posterior_mean(half, 1.0)
    assert mean.dtype == torch.float16
    torch.testing.assert_close(mean, estimator.posterior_mean(half.float(), 1.0).half(), atol=0, rtol=0)
    rows = latents(data)
    apart = torch.cat([estimator.posterior_mean(z[None], t) for z, t in zip(rows, LEVELS, strict=True)])
    torch.testing.assert_close(estimator.posterior_mean(rows, LEVELS), apart, atol=1e-6, rtol=0)


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


def test_the_largest_tensor_is_bounded(monkeypatch):
    """Patches of all images would be 300·64·27·8 bytes = 4 MB; no tensor may have an eighth of it."""
    limit, seen = 2**18, []

    def recorded(*size, make=torch.empty, **options):
        made = make(*size, **options)
        seen.append(made.nbytes)
        return made

    monkeypatch.setattr(patch_posterior, "work_bytes", lambda device: limit)
    monkeypatch.setattr(patch_posterior.torch, "empty", recorded)
    monkeypatch.setattr(patch_posterior.torch, "bmm", lambda *args, make=torch.bmm: recorded(*args, make=make))
    data = reference(N=300, shape=(3, 8, 8))
    PatchPosterior(3).bind(data).posterior_mean(latents(data, torch.ones(2)), 1.0)
    assert 0 < max(seen) <= 2 * limit


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


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: PatchPosterior(0), "PatchPosterior: size must be at least 1, got 0"),
        (lambda: PatchPosterior(3, 0), "PatchPosterior: stride must be at least 1, got 0"),
        (lambda: PatchPosterior(2.5), "PatchPosterior: size must be an integer, got 2.5"),
        (lambda: PatchPosterior({}), "PatchPosterior: size must be a number, a table"),
        (lambda: PatchPosterior({0: 3}), "noise levels of size must be finite and above 0, got 0"),
        (lambda: PatchPosterior(3, 4).bind(reference()), "stride=4 is more than size=3"),
        (lambda: PatchPosterior(8).bind(reference()), "PatchPosterior: size=8 is more than 7"),
        (
            lambda: PatchPosterior(1).bind(ReferenceSet(low_rank_vectors())),
            r"needs images \(C, H, W\), got data of shape",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, line):
    with pytest.raises(InputError, match=line):
        make()
