"""The exact mean by float32 products with float64 repairs, against enumeration in float64; and pieces of all sizes."""

import contextlib
import copy
import math
import pickle

import pytest
import torch

from benchmarks.common import in_own_process
from lit_knn.common import memory
from lit_knn.common.errors import InputError
from lit_knn.common.memory import process_bytes
from lit_knn.estimators import (
    ByClass,
    Exact,
    MonteCarlo,
    PatchPosterior,
    PCALocality,
    Switched,
    centred,
    exact,
    patch_posterior,
    pca_locality,
    two_passes,
    weighted_sum,
)
from lit_knn.reference import ReferenceSet, ShardedReferenceSet, gathered, streaming
from lit_knn.theory.posterior import posterior_mean
from tests.any_data import all_images
from tests.every_estimator import every_estimator
from tests.toys import noisy, pixels, rng, two_groups

# A hundredth of the 1e-9 that the docs promise. Each processor adds float32 products in an order of its own: a sum that
# errs by 6e-13 on one errs by more on the next.
BOUND = 1e-11


def worst(reference, z, t):
    """The largest squared error per dimension over the latents, before the mean is rounded to float32."""
    mean, _ = exact.exact_sums(reference, z, torch.full((len(z),), t, dtype=torch.float64))
    return (
        (mean - posterior_mean(z, all_images(reference), t))
        .square()
        .flatten(1)
        .mean(1)
        .max()
        .item()
    )


def worst_near(reference, t):
    """The same, for latents of some images."""
    x = reference.gather(torch.randint(reference.N, (16,), generator=rng(1)))
    return worst(reference, noisy(x, t, seed=2), t)


@pytest.mark.parametrize("t", [1e-30, 0.002, 0.05, 0.2, 0.5, 1.0, 3.0, 10.0, 80.0])
@pytest.mark.parametrize("kind", ["smooth", "two groups", "noise", "floats"])
def test_it_is_the_enumerated_mean(kind, t):
    images = {
        "smooth": pixels(N=400),
        "two groups": two_groups(N=300),
        "noise": torch.randint(256, (500, 3, 16, 16), dtype=torch.uint8, generator=rng()),
        "floats": torch.randn(300, 2, 6, 6, generator=rng()),
    }[kind]
    for hflip in (False, True):
        assert worst_near(ReferenceSet(images, hflip=hflip), t) < BOUND


@pytest.mark.parametrize("t", [0.05, 0.2, 0.5, 1.0, 3.0])
def test_floats_far_from_0_keep_their_digits(t, monkeypatch):
    # Plain products in float32 have errors of 1e-4 and 1e-7 at t = 0.5. Differences from the mean need no float64.
    with monkeypatch.context() as context:
        context.delattr(two_passes, "float_sums")
        assert worst_near(ReferenceSet(torch.randn(20_000, 16, generator=rng()) + 100), t) < BOUND
    sides = 60 * torch.randint(2, (20_000, 1), generator=rng(3)) - 30
    clusters = ReferenceSet(torch.randn(20_000, 16, generator=rng()) + sides)
    assert worst_near(clusters, t) < 10 * BOUND  # the variance is 900
    mirrored = torch.randn(3_000, 1, 4, 4, generator=rng()) + torch.arange(4) * 50
    assert worst_near(ReferenceSet(mirrored, hflip=True), t) < BOUND


@pytest.mark.parametrize("centre", [0.0, 100.0])
def test_latents_of_many_levels_do_not_disturb_each_other(centre):
    # The nearest images have all the weight of the first latents, and no image has much of the last ones'.
    reference = ReferenceSet(torch.randn(3_000, 1, 4, 4, generator=rng()) + centre, hflip=True)
    x, t = all_images(reference), torch.logspace(-3, 1, 40, dtype=torch.float64)
    z = (x[:40] + t.view(-1, 1, 1, 1) * torch.randn(40, 1, 4, 4, generator=rng(1))).float()
    mean, _ = exact.exact_sums(reference, z, t)
    expected = torch.cat([posterior_mean(z[i : i + 1], x, float(t[i])) for i in range(40)])
    assert (mean - expected).square().flatten(1).mean(1).max() < BOUND


@pytest.mark.parametrize("far", [0.0, 30.0, 1000.0])
def test_latents_far_from_all_images_at_high_noise(far):
    # The weights of one pass over the images would all be 0 or infinite.
    x = pixels(N=400)
    z = far + noisy(ReferenceSet(x).gather(torch.arange(20)), 10.0)
    z[::2] *= -1
    assert worst(ReferenceSet(x, hflip=True), z, 10.0) < BOUND


def taken():
    """The bytes that the first call keeps, for images of 61 MB, which are 492 MB in float64."""
    reference = ReferenceSet(torch.randint(256, (20_000, 3, 32, 32), dtype=torch.uint8))
    estimator, before = Exact().bind(reference), process_bytes()
    estimator.posterior_mean(reference.gather(torch.arange(4)), 5.0)
    return process_bytes() - before


def test_the_pieces_of_a_set_leave_their_memory_to_the_next():
    # With small results of each piece kept, the process held 740 to 960 MB in most runs: it depends on the allocator.
    assert in_own_process(taken) < 150e6


def test_pieces_are_whole_tiles_of_a_gpu(monkeypatch):
    seen, add_product = [], weighted_sum.add_product
    monkeypatch.setattr(centred, "CHUNK_BYTES", 4 * 108 * 100)
    monkeypatch.setattr(
        weighted_sum, "add_product", lambda *args: (seen.append(args[2].shape), add_product(*args))
    )
    assert worst_near(ReferenceSet(pixels(N=400)), 5.0) < BOUND
    assert {size for shape in seen for size in shape} == {108, 64, 400 % 64}


@pytest.mark.parametrize("t", [0.005, 0.05, 0.5])
def test_many_near_points_of_few_dimensions(t):
    # Far more than 32 points share the posterior, and one float32 sum over 50,000 would lose five digits.
    assert worst_near(ReferenceSet(torch.randn(50_000, 2, generator=rng())), t) < BOUND


@pytest.mark.parametrize("t", [0.002, 0.05, 1.0, 10.0])
def test_more_copies_of_an_image_than_are_computed_again(t):
    images = torch.randint(
        256, (10, 3, 32, 32), dtype=torch.uint8, generator=rng()
    ).repeat_interleave(50, 0)
    assert worst_near(ReferenceSet(images, hflip=True), t) < BOUND


@pytest.mark.parametrize("t", [0.002, 0.005, 0.02])
def test_ties_of_more_images_than_are_computed_again(t):
    # At d = 12,288 and small t, float32 rounds the log-likelihoods by up to a hundred.
    pair = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8, generator=rng())
    pair[1] = pair[0]
    pair[1, 0, 0, :8] ^= 1
    far = torch.randint(256, (50, 3, 64, 64), dtype=torch.uint8, generator=rng(3))
    between = ReferenceSet(pair).gather(torch.arange(2)).mean(0, keepdim=True)
    z = between + t * torch.randn(8, 3, 64, 64, generator=rng(1))
    assert worst(ReferenceSet(torch.cat([pair.repeat_interleave(50, 0), far])), z, t) < 1e-20


def test_what_only_many_images_together_weigh_is_not_lost():
    # Each of 20,000 images has at most 1/30,000 of the largest weight, so that one long float32 sum would lose them.
    images = torch.randint(100, 102, (20_000, 1, 4, 4), dtype=torch.uint8, generator=rng())
    images[:40] = 20
    reference = ReferenceSet(images)
    x = all_images(reference)
    z = torch.cat([torch.lerp(x[:1], x[100:101], share) for share in (0.38, 0.40)])
    weights = torch.softmax(-torch.cdist(z.flatten(1), x.flatten(1)).square() / (2 * 0.25**2), 1)
    assert (weights[:, 40:].sum(1) > 2e-3).all()
    assert worst(reference, z, 0.25) < 1e-9


def enumerated_density(x, z, t):
    """log p_t(z) by enumeration in float64, from PyTorch's own normal density."""
    x, z = x.flatten(1).double(), z.flatten(1).double()
    log_p = torch.distributions.Normal(x, t).log_prob(z.unsqueeze(1)).sum(2)
    return torch.logsumexp(log_p, 1) - math.log(len(x))


@pytest.mark.parametrize("t", [1e-30, 0.002, 0.2, 1.0, 5.0, 80.0])
@pytest.mark.parametrize("kind", ["pixels", "floats far from 0", "shard"])
def test_the_log_density_is_the_enumerated_one(kind, t):
    if kind == "pixels":
        reference = ReferenceSet(pixels(N=300, shape=(1, 8, 8)), hflip=True)
    else:
        made = ReferenceSet if kind == "floats far from 0" else ShardedReferenceSet
        reference = made(torch.randn(300, 12, generator=rng()) + 50)
    x = reference.gather(torch.arange(reference.N))
    z = noisy(x[::20], t)
    density = Exact().bind(reference).log_density(z, t)
    assert density.dtype == torch.float64
    assert density.shape == (len(z),)
    # Rounding of scores in float32 gave 2e-6 at most, on 5,000 images of 3,072 pixels too.
    assert (density - enumerated_density(x, z, t)).abs().max() < 1e-4


@pytest.mark.parametrize("estimator", [Exact(), PCALocality(0.05), PatchPosterior(3)])
def test_a_transform_leaves_nothing_of_its_own_in_the_set(estimator):
    reference = ReferenceSet(pixels(40, (1, 4, 4)))
    x = reference.gather(torch.arange(3))
    z, change = noisy(x, 1.0), torch.ones_like(x)
    estimator = copy.deepcopy(estimator).bind(reference)
    with contextlib.suppress(RuntimeError):  # Not every estimator has a derivative.
        torch.func.jvp(lambda z: estimator.posterior_mean(z, 1.0), (z,), (change,))
    fresh = copy.deepcopy(estimator).bind(ReferenceSet(pixels(40, (1, 4, 4))))
    expected = fresh.posterior_mean(z, 1.0)
    again = pickle.loads(pickle.dumps(estimator)).posterior_mean(z, 1.0)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_density_integrates_to_1_and_its_gradient_is_the_score():
    estimator = Exact().bind(ReferenceSet(torch.tensor([[-0.6], [0.1], [0.7]])))
    z = torch.linspace(-6, 6, 6001, dtype=torch.float64).unsqueeze(1)
    density = estimator.log_density(z, 0.3)
    assert torch.trapezoid(density.exp(), z[:, 0]).item() == pytest.approx(1, abs=1e-9)
    (slope,) = torch.gradient(density, spacing=(z[:, 0],))
    torch.testing.assert_close(slope[1:-1], estimator.score(z, 0.3)[1:-1, 0], rtol=0, atol=1e-3)


def test_class_density_is_over_its_images_and_others_have_none():
    images, labels = torch.randn(60, 3, generator=rng()), torch.arange(60) % 2
    reference, z = ReferenceSet(images, labels=labels), torch.randn(4, 3, generator=rng(1))
    chosen = torch.tensor([0, 1, 1, -1])
    by_class = ByClass(Exact(), unlabelled=True).bind(reference).log_density(z, 0.5, labels=chosen)
    for row, own in enumerate((images[::2], images[1::2], images[1::2], images)):
        expected = enumerated_density(own, z[row : row + 1], 0.5).item()
        assert by_class[row].item() == pytest.approx(expected, abs=1e-5)
    whole = ReferenceSet(images)
    for other, among, classes in (
        (MonteCarlo(4), whole, None),
        (ByClass(MonteCarlo(4)), reference, chosen.clamp(min=0)),
        (Switched(Exact(), Exact(), 1.0), whole, None),
    ):
        with pytest.raises(
            InputError, match=r"it computes no density; Exact and ByClass\(Exact\(\)\) do"
        ):
            other.bind(among).log_density(z, 0.5, labels=classes)
    with pytest.raises(InputError, match="labels missing"):
        ByClass(Exact()).bind(reference).log_density(z, 0.5)


# Memory for a few images or latents at a time.
LITTLE = {
    memory: {"WORK_BYTES": 8 * 400},
    gathered: {"GATHER_BYTES": 4 * 16 * 16 * 3},
    centred: {"CHUNK_BYTES": 4 * 16 * 7},
    weighted_sum: {"TERMS": 20},
    exact: {"SCORE_BYTES": 1, "MIN_LATENTS": 3},
    patch_posterior: {"STATE_BYTES": 1, "ITEMS": 3},
    pca_locality: {"SIDE": 1},
}
MAKERS = every_estimator(k=40, n=15, r=8, coarse=4, candidates=40)


@pytest.mark.parametrize("name", MAKERS)
def test_pieces_of_any_size_give_the_same_mean(name, monkeypatch):
    # The pieces of some have at least 32 latents.
    reference, t = (
        ReferenceSet(pixels(60, (1, 4, 4)), hflip=True),
        torch.logspace(-1, 1, 4).repeat(10),
    )
    x = reference.gather(torch.arange(40))
    estimator, z = MAKERS[name]().bind(reference), noisy(x, t)
    whole = estimator.posterior_mean(z, t, x, rng())
    for module, limits in LITTLE.items():
        for limit, value in limits.items():
            monkeypatch.setattr(module, limit, value)
    again = (
        MAKERS[name]()
        .bind(ReferenceSet(pixels(60, (1, 4, 4)), hflip=True))
        .posterior_mean(z, t, x, rng())
    )
    # Sums in another order of float32 numbers up to 1.
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-5)


def test_the_memory_of_one_piece_is_bounded(monkeypatch):
    monkeypatch.setattr(memory, "WORK_BYTES", 8 * 100)
    reference, z = ReferenceSet(torch.randn(60, 4)), torch.randn(50, 4)
    mean = MonteCarlo(20_000).bind(reference).posterior_mean(z[:4], 1.0)
    # six times 1/sqrt(20,000)
    assert (mean - posterior_mean(z[:4], reference.images, 1.0)).abs().max() < 0.05
    batches = [*streaming.batches_of(z, reference.d)]
    assert [row for rows in batches for row in range(50)[rows]] == [*range(50)]
    for rows in batches:
        pieces = [*streaming.stream_sq_dist(reference, z[rows])]
        assert [i for ids, _, _ in pieces for i in range(60)[ids]] == [*range(60)]
        assert all(max(x.double().nbytes, sq_dist.nbytes) <= 8 * 100 for _, x, sq_dist in pieces)
