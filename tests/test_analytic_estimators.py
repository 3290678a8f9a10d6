"""Smoothed, PCALocality and Golden against loops in float64, quadrature and limits."""

import math

import numpy as np
import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.estimators import (
    KNN,
    ByClass,
    Estimator,
    Exact,
    ExactFloat64,
    Golden,
    OneSample,
    PCALocality,
    Smoothed,
    Switched,
    Wiener,
    local_sums,
    pca_locality,
    running_mean,
)
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from tests.toys import low_rank_vectors, noisy, pixels

SETS = {
    "pixels": lambda: ReferenceSet(pixels(30, (3, 6, 5)), hflip=True),
    "more images than pixels": lambda: ReferenceSet(pixels(60, (1, 4, 6))),
    "floats": lambda: ReferenceSet(low_rank_vectors(40)),
}
LEVELS = torch.tensor([0.02, 0.3, 1.0, 1.0, 5.0, 80.0], dtype=torch.float64)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def latents(reference, t=LEVELS):
    return noisy(reference.gather(torch.arange(len(LEVELS))), t)


def everything(reference):
    return reference.gather(torch.arange(reference.N)).flatten(1).double().numpy()


def local_mean(x, z, t, threshold):
    """The mean of one z over images x (N, d), pixel by pixel; the filter by an inverse."""
    covariance = np.cov(x.T, bias=True)
    weights = np.abs(covariance @ np.linalg.inv(covariance + t**2 * np.eye(len(z))))
    mean = np.empty_like(z)
    for p in range(len(z)):
        seen = weights[p] >= threshold * weights[p].max()
        log_w = -np.square(z - x)[:, seen].sum(1) / (2 * t**2)
        w = np.exp(log_w - log_w.max())
        mean[p] = w @ x[:, p] / w.sum()
    return mean


@pytest.mark.parametrize("threshold", [0.05, 0.3])
@pytest.mark.parametrize("kind", SETS)
def test_locality_equals_loops_over_pixels(kind, threshold):
    reference = SETS[kind]()
    z = latents(reference)
    x, flat = everything(reference), z.flatten(1).double().numpy()
    expected = np.stack([local_mean(x, row, t, threshold) for row, t in zip(flat, LEVELS.tolist(), strict=True)])
    estimator = PCALocality(threshold).bind(reference)
    mean = estimator.posterior_mean(z, LEVELS)
    np.testing.assert_allclose(mean.flatten(1), expected, atol=1e-5, rtol=1e-5)
    exact = ExactFloat64().bind(reference).posterior_mean(z, LEVELS)
    assert (mean - exact).abs().max() > 0.01


@pytest.mark.parametrize("kind", SETS)
def test_locality_of_all_pixels_is_the_exact_mean(kind):
    reference = SETS[kind]()
    z = latents(reference)
    exact = ExactFloat64().bind(reference).posterior_mean(z, LEVELS)
    ours = PCALocality(0.0).bind(reference).posterior_mean(z, LEVELS)
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


def test_locality_of_independent_pixels_is_the_posterior_of_each_pixel():
    # Every combination of values: the pixels are independent, so the mean of each follows from its own values.
    values = torch.tensor([-1.0, 0.2, 1.0])
    x = torch.cartesian_prod(values, values, 2 * values)
    z = torch.randn(5, 3, generator=rng())
    own = [posterior_mean(z[:, p, None].double(), x[:, p, None].double(), 0.7) for p in range(3)]
    estimator = PCALocality(0.5).bind(ReferenceSet(x))
    assert torch.equal(estimator.masks(0.7), torch.eye(3, dtype=torch.bool))
    torch.testing.assert_close(estimator.posterior_mean(z, 0.7).double(), torch.cat(own, 1), atol=1e-6, rtol=0)


def test_locality_does_not_depend_on_pieces_tiles_and_batches(monkeypatch):
    reference = SETS["pixels"]()
    z = latents(reference)
    whole = PCALocality(0.1).bind(reference).posterior_mean(z, LEVELS)
    rows = PCALocality(0.1).bind(reference)
    one_by_one = torch.cat([rows.posterior_mean(z[i : i + 1], LEVELS[i]) for i in range(len(z))])
    torch.testing.assert_close(one_by_one, whole, atol=1e-5, rtol=0)
    for name, value in {"work_bytes": lambda device: 8 * 90 * 7, "SIDE": 1}.items():
        monkeypatch.setattr(local_sums, name, value)
        again = PCALocality(0.1).bind(reference).posterior_mean(z, LEVELS)
        torch.testing.assert_close(again, whole, atol=1e-5, rtol=0)


def test_float32_where_it_is_enough_is_as_good_as_float64(monkeypatch):
    reference = SETS["pixels"]()
    z = latents(reference)
    ours = PCALocality(0.1).bind(reference).posterior_mean(z, LEVELS)
    monkeypatch.setattr(running_mean, "MOST_ROUNDING", 0.0)
    torch.testing.assert_close(PCALocality(0.1).bind(reference).posterior_mean(z, LEVELS), ours, atol=3e-6, rtol=0)


def test_limits_of_locality():
    reference = SETS["more images than pixels"]()
    z = latents(reference)
    estimator = PCALocality(0.05).bind(reference)
    mean = reference.mean().reshape(reference.shape).expand(z.shape)
    torch.testing.assert_close(estimator.posterior_mean(z, 1e6), mean, atol=1e-5, rtol=0)
    # As t vanishes, each pixel sees itself alone, and takes the nearest value of that pixel.
    x = torch.from_numpy(everything(reference)).float()
    place = (z.flatten(1).unsqueeze(1) - x).abs().argmin(1)
    nearest = x.gather(0, place).reshape(z.shape)
    torch.testing.assert_close(estimator.posterior_mean(z, 1e-5), nearest, atol=1e-6, rtol=0)
    one = PCALocality().bind(ReferenceSet(pixels(1, (1, 4, 4))))
    z = torch.randn(3, 1, 4, 4, generator=rng())
    torch.testing.assert_close(one.posterior_mean(z, 1.0), one.reference.gather(torch.zeros(3, dtype=torch.int64)))


def test_smoothed_mean_of_two_values_equals_quadrature():
    x, z, t, width = torch.tensor([[-1.0], [2.0]]), 0.7, 0.4, 0.5
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    near = torch.from_numpy(z + width * nodes)[:, None]
    expected = weights @ posterior_mean(near, x.double(), t).numpy()[:, 0] / math.sqrt(2 * math.pi)
    smoothed = Smoothed(ExactFloat64(), width, n=64).bind(ReferenceSet(x))
    means = smoothed.posterior_mean(torch.full((4000, 1), z), t, generator=rng()).double()
    assert abs(means.mean().item() - expected) < 4 * means.std().item() / math.sqrt(4000)
    assert means.std() / math.sqrt(4000) < 2e-3
    alone = ExactFloat64().bind(ReferenceSet(x)).posterior_mean(torch.tensor([[z]]), t)
    assert abs(alone.item() - expected) > 0.05


def test_one_pair_is_exact_for_a_linear_estimate():
    reference = SETS["floats"]()
    z = latents(reference)
    linear = Wiener(r=12).bind(reference).posterior_mean(z, 1.0)
    torch.testing.assert_close(Smoothed(Wiener(r=12), 3.0, n=2).bind(reference).posterior_mean(z, 1.0), linear)
    alone = Smoothed(Wiener(r=12), 3.0, n=3).bind(reference).posterior_mean(z, 1.0)
    assert (alone - linear).abs().max() > 0.1


def test_smoothed_depends_on_its_generator_and_width_alone():
    reference = SETS["pixels"]()
    z = latents(reference)
    exact = Exact().bind(reference).posterior_mean(z, LEVELS)
    assert torch.equal(Smoothed(Exact(), 0, n=5).bind(reference).posterior_mean(z, LEVELS), exact)
    tiny = Smoothed(Exact(), 1e-5, n=5).bind(reference).posterior_mean(z, LEVELS, generator=rng())
    torch.testing.assert_close(tiny, exact, atol=1e-3, rtol=0)
    ours = Smoothed(Exact(), 0.5, n=5).bind(reference)
    first, again, other = (ours.posterior_mean(z, LEVELS, generator=rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", SETS)
def test_golden_mean_is_the_mean_over_the_nearest_images(kind):
    reference = SETS[kind]()
    z, x = latents(reference), torch.from_numpy(everything(reference))
    ours = Golden(Exact(), 7).bind(reference).posterior_mean(z, LEVELS)
    flat = z.flatten(1).double()
    for row, t in enumerate(LEVELS.tolist()):
        nearest = x[(x - flat[row]).square().sum(1).argsort()[:7]]
        expected = posterior_mean(flat[row : row + 1], nearest, t)[0]
        torch.testing.assert_close(ours[row].flatten().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [Exact, lambda: PCALocality(0.1), lambda: Switched(PCALocality(0.1), Exact(), 1.0), lambda: Smoothed(Exact(), 0.0)],
    ids=["Exact", "PCALocality", "Switched", "Smoothed"],
)
def test_golden_over_all_images_is_the_estimator_itself(make):
    reference = SETS["pixels"]()
    z = latents(reference)
    own = make().bind(reference).posterior_mean(z, LEVELS)
    golden = Golden(make(), reference.N).bind(reference)
    torch.testing.assert_close(golden.posterior_mean(z, LEVELS), own, atol=1e-5, rtol=0)
    few = Golden(make(), 3).bind(reference).posterior_mean(z, LEVELS)
    assert (few - own).abs().max() > 0.01


def test_golden_locality_keeps_the_masks_of_all_images():
    reference = SETS["pixels"]()
    z, x = latents(reference, 0.3), everything(reference)
    ours = Golden(PCALocality(0.1), 9).bind(reference).posterior_mean(z, 0.3)
    masks = PCALocality(0.1).bind(reference).masks(0.3).numpy()
    for row, own in zip(z.flatten(1).double().numpy(), ours.flatten(1).numpy(), strict=True):
        nearest = x[np.square(x - row).sum(1).argsort()[:9]]
        log_w = -np.square(row - nearest) @ masks.T / (2 * 0.3**2)
        w = np.exp(log_w - log_w.max(0))
        np.testing.assert_allclose(own, (w * nearest).sum(0) / w.sum(0), atol=1e-5)


def test_counts_of_golden():
    reference = ReferenceSet(torch.randn(1000, 2, generator=rng()))
    t = torch.tensor([1e-6, 1.0, 1e4])
    rule = Golden(Exact()).bind(reference).counts(t)
    assert rule.tolist() == [50, round(50 + 50 / math.sqrt(2)), 100]
    table = Golden(Exact(), {1.0: 20, 0.5: 10, 100: 900}).bind(reference)
    assert table.counts(torch.tensor([0.1, 0.5, 0.99, 1.0, 99.0, 100.0])).tolist() == [10, 10, 10, 20, 20, 900]


ALL = {
    "Smoothed": lambda: Smoothed(Exact(), 0.1, n=4),
    "PCALocality": PCALocality,
    "Golden": lambda: Golden(Exact(), 5),
    "Golden PCALocality": lambda: Golden(PCALocality(0.1), 5),
}


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("name", ALL)
def test_extreme_levels_half_precision_and_empty_batches(name, kind):
    reference = SETS[kind]()
    estimator = ALL[name]().bind(reference)
    t = torch.tensor([1e-6, 1e-4, 0.002, 1e2, 1e4, 1e4], dtype=torch.float64)
    z = latents(reference, t)
    mean = estimator.posterior_mean(z, t, generator=rng())
    assert mean.isfinite().all()
    assert mean.abs().max() <= reference.largest * 1.0001
    half = estimator.posterior_mean(latents(reference).half(), LEVELS, generator=rng())
    assert half.dtype == torch.float16
    assert half.isfinite().all()
    assert estimator.posterior_mean(z[:0], 1.0).shape == z[:0].shape


@pytest.mark.parametrize("name", ALL)
def test_classes_are_averaged_apart(name):
    images, labels = pixels(40, (1, 4, 4)), torch.arange(40) % 2
    z = noisy(ReferenceSet(images).gather(torch.arange(6)), 0.5)
    which = torch.tensor([0, 1, 1, 0, 1, 0])
    ours = ByClass(ALL[name]()).bind(ReferenceSet(images, labels=labels))
    mean = ours.posterior_mean(z, 0.5, labels=which, generator=rng())
    if name == "Smoothed":
        assert mean.isfinite().all()
        return
    for label in (0, 1):
        part = ALL[name]().bind(ReferenceSet(images[labels == label]))
        torch.testing.assert_close(mean[which == label], part.posterior_mean(z[which == label], 0.5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Smoothed(Exact(), -1.0), "Smoothed: width must be finite and at least 0, got -1.0"),
        (lambda: Smoothed(Exact(), math.nan), "Smoothed: width must be finite"),
        (lambda: Smoothed(Exact(), 1.0, n=0), "Smoothed: n must be at least 1, got 0"),
        (lambda: Smoothed(ByClass(Exact()), 1.0), "Smoothed: ByClass takes labels itself"),
        (lambda: Smoothed("exact", 1.0), "Smoothed: estimator must be an estimator, got 'exact'"),
        (lambda: PCALocality(1.5), "PCALocality: threshold must be from 0 to 1, got 1.5"),
        (lambda: PCALocality(math.nan), "PCALocality: threshold must be from 0 to 1, got nan"),
        (lambda: Golden(Exact(), 0), "Golden: k must be at least 1, got 0"),
        (lambda: Golden(Exact(), {}), "Golden: k is an empty table"),
        (lambda: Golden(Exact(), {-1.0: 3}), "Golden: a noise level in k must be finite and at least 0, got -1.0"),
        (lambda: Golden(OneSample(), 3), "Golden: OneSample averages over no images"),
        (lambda: Golden(ByClass(Exact()), 3), "Golden: ByClass takes labels itself"),
        (lambda: Golden(Exact(), 41).bind(SETS["floats"]()), "Golden: k=41 is more than the 40 images"),
        (lambda: Golden(KNN(9, 2), {0: 3, 1: 20}).bind(SETS["floats"]()), "Golden: KNN: k=9 is more than the 3 images"),
        (lambda: Smoothed(KNN(k=50), 1.0).bind(SETS["floats"]()), "Smoothed: KNN: k=50 is more than the 40 images"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(make, message):
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_golden_refuses_an_approximate_index_that_finds_too_few():
    reference = ReferenceSet(low_rank_vectors(60), index=FaissIndex("IVF20,Flat", 1))
    z = latents(reference)
    _, ids = reference.search(z, 30)
    found = (ids >= 0).sum(1)
    assert 0 < found[0] < 30
    # At `bind`, the settings of the index are valid: whether it finds enough depends on z.
    with pytest.raises(InputError, match=f"Golden: the index found {found[0]} of the k=30 images nearest to a z; let"):
        Golden(Exact(), 30).bind(reference).posterior_mean(z, LEVELS)
    nearest = reference.gather(ids[:, 0])
    torch.testing.assert_close(Golden(Exact(), 1).bind(reference).posterior_mean(z, LEVELS), nearest)


class Remembering(Estimator):
    """The first image, which the estimator remembers in a container of its own."""

    def __init__(self, kept):
        self.kept = kept

    def _posterior_mean(self, z, t, x_source, generator):
        if not self.kept:
            self.kept.append(self.reference.gather(torch.zeros(1, dtype=torch.int64)))
        return self.kept[0].expand_as(z)


def test_golden_keeps_what_the_images_of_each_z_leave_apart():
    reference = SETS["floats"]()
    z = latents(reference)
    _, ids = reference.search(z, 1)
    ours = Golden(Remembering([]), 1).bind(reference).posterior_mean(z, 1.0)
    torch.testing.assert_close(ours, reference.gather(ids[:, 0]))


def test_golden_locality_computes_the_masks_of_a_level_once(monkeypatch):
    reference, seen = SETS["pixels"](), []
    ours, tiles = Golden(PCALocality(0.1), 3).bind(reference), pca_locality.tiles_of
    monkeypatch.setattr(pca_locality, "tiles_of", lambda masks, shape: seen.append(shape) or tiles(masks, shape))
    ours.posterior_mean(latents(reference), 1.0)
    assert len(seen) == 1


@pytest.mark.parametrize("N", [1, 60])
def test_extreme_levels_equal_float64(N):
    reference = ReferenceSet(pixels(N, (1, 4, 6)))
    t = torch.tensor([1e-3, 1e-3, 0.5, 1e3, 1e3], dtype=torch.float64)
    z, x = noisy(reference.gather(torch.arange(5) % N), t), everything(reference)
    flat = z.flatten(1).double()
    local = np.stack([local_mean(x, row, level, 0.05) for row, level in zip(flat.numpy(), t.tolist(), strict=True)])
    ours = PCALocality(0.05).bind(reference).posterior_mean(z, t).flatten(1)
    # With one image the covariance is 0, and so is every mask's threshold.
    expected = local if N > 1 else np.repeat(x, 5, 0)
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)
    k = max(N // 6, 1)
    golden = Golden(Exact(), k).bind(reference).posterior_mean(z, t).flatten(1)
    smoothed = Smoothed(ExactFloat64(), 0.2, n=2).bind(reference)
    near = smoothed.posterior_mean(z, t, generator=rng()).flatten(1).double()
    # `Smoothed` documents its draws: η and −η.
    eta = torch.randn(1, *z.shape, generator=rng()).flatten(2)[0].double()
    for row, level in enumerate(t.tolist()):
        nearest = torch.from_numpy(x)[(torch.from_numpy(x) - flat[row]).square().sum(1).argsort()[:k]]
        own = posterior_mean(flat[row : row + 1], nearest, level)[0]
        torch.testing.assert_close(golden[row].double(), own, atol=1e-5, rtol=0)
        pair = torch.stack([flat[row] + 0.2 * eta[row], flat[row] - 0.2 * eta[row]])
        own = posterior_mean(pair.float().double(), torch.from_numpy(x), level).mean(0)
        torch.testing.assert_close(near[row], own, atol=1e-5, rtol=0)
