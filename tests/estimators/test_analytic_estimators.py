"""Smoothed and PCALocality against loops in float64 and quadrature, also at extreme noise levels."""

import math

import numpy as np
import pytest
import torch

from lit_knn.estimators import (
    Exact,
    PCALocality,
    Smoothed,
    Wiener,
    pca_locality,
)
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
    exact = Exact().bind(reference).posterior_mean(z, LEVELS)
    assert (mean - exact).abs().max() > 0.01


def test_locality_does_not_depend_on_pieces_tiles_and_batches(monkeypatch):
    reference = SETS["pixels"]()
    z = latents(reference)
    whole = PCALocality(0.1).bind(reference).posterior_mean(z, LEVELS)
    rows = PCALocality(0.1).bind(reference)
    one_by_one = torch.cat([rows.posterior_mean(z[i : i + 1], LEVELS[i]) for i in range(len(z))])
    torch.testing.assert_close(one_by_one, whole, atol=1e-5, rtol=0)
    for name, value in {"work_bytes": lambda device: 8 * 90 * 7, "SIDE": 1}.items():
        monkeypatch.setattr(pca_locality, name, value)
        again = PCALocality(0.1).bind(reference).posterior_mean(z, LEVELS)
        torch.testing.assert_close(again, whole, atol=1e-5, rtol=0)


def test_smoothed_mean_of_two_values_equals_quadrature():
    x, z, t, width = torch.tensor([[-1.0], [2.0]]), 0.7, 0.4, 0.5
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    near = torch.from_numpy(z + width * nodes)[:, None]
    expected = weights @ posterior_mean(near, x.double(), t).numpy()[:, 0] / math.sqrt(2 * math.pi)
    smoothed = Smoothed(Exact(), width, n=64).bind(ReferenceSet(x))
    means = smoothed.posterior_mean(torch.full((4000, 1), z), t, generator=rng()).double()
    assert abs(means.mean().item() - expected) < 4 * means.std().item() / math.sqrt(4000)
    assert means.std() / math.sqrt(4000) < 2e-3
    alone = Exact().bind(ReferenceSet(x)).posterior_mean(torch.tensor([[z]]), t)
    assert abs(alone.item() - expected) > 0.05


def test_one_pair_is_exact_for_a_linear_estimate():
    reference = SETS["floats"]()
    z = latents(reference)
    linear = Wiener(r=12).bind(reference).posterior_mean(z, 1.0)
    torch.testing.assert_close(Smoothed(Wiener(r=12), 3.0, n=2).bind(reference).posterior_mean(z, 1.0), linear)
    alone = Smoothed(Wiener(r=12), 3.0, n=3).bind(reference).posterior_mean(z, 1.0)
    assert (alone - linear).abs().max() > 0.1


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
    smoothed = Smoothed(Exact(), 0.2, n=2).bind(reference)
    near = smoothed.posterior_mean(z, t, generator=rng()).flatten(1).double()
    # `Smoothed` documents its draws: η and −η.
    eta = torch.randn(1, *z.shape, generator=rng()).flatten(2)[0].double()
    for row, level in enumerate(t.tolist()):
        pair = torch.stack([flat[row] + 0.2 * eta[row], flat[row] - 0.2 * eta[row]])
        own = posterior_mean(pair.float().double(), torch.from_numpy(x), level).mean(0)
        torch.testing.assert_close(near[row], own, atol=1e-5, rtol=0)
