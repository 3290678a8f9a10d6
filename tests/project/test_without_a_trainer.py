"""Metrics from plain Python, as in a notebook, against independently computed numbers."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from scipy.stats import sem

from lit_knn.estimators import Exact, MonteCarlo, OneSample
from lit_knn.metrics import ErrorCurve, FidelityMeasure, Pixels, frechet_distance
from lit_knn.metrics.feature_statistics import image_statistics
from lit_knn.metrics.fidelity import frechet_distance_of_statistics
from lit_knn.reference import ReferenceSet

N, d, n, LEVELS = 40, 3, 16, [0.4, 2.0]


class Watched(OneSample):
    """Records its latents in float64."""

    def __init__(self):
        self.seen = {}

    def posterior_mean(self, z, t, x_source=None, generator=None, labels=None):
        if x_source is not None and x_source is not z:
            self.seen.setdefault(t, []).append((z.double().numpy(), x_source.double().numpy()))
        return super().posterior_mean(z, t, x_source, generator, labels)


def enumerated(x, z, t):
    """The posterior mean of each z and its variance per dimension, over all x."""
    sq_dist = ((z[:, None] - x) ** 2).sum(2)
    p = np.exp(-(sq_dist - sq_dist.min(1, keepdims=True)) / (2 * t**2))
    p /= p.sum(1, keepdims=True)
    mean = p @ x
    return mean, (p @ x**2 - mean**2).mean(1)


def test_an_error_curve_is_that_of_enumeration():
    points = np.random.default_rng(0).normal(size=(N, d)).astype(np.float32)
    watched, told = Watched(), []
    estimators = {"source": watched, "drawn": MonteCarlo(n=n), "exact": Exact()}
    curve = ErrorCurve(estimators, LEVELS, num_z=N, repeats=200, batch_size=16)
    # Levels come one by one, and tell how far they are.
    rows = [row for level in curve.levels(ReferenceSet(points), 1, told.append) for row in level]
    assert sum(told) == curve.estimates
    by_name = {(row["estimator"], row["t"]): row for row in rows}
    assert list(by_name) == [(name, t) for t in LEVELS for name in estimators]
    for t in LEVELS:
        z, x = (np.concatenate(parts) for parts in zip(*watched.seen[t], strict=True))
        # Each image occurs once, in batches of 16.
        assert len(watched.seen[t]) == 3
        np.testing.assert_array_equal(np.sort(x, 0), np.sort(points.astype(float), 0))
        mean, variance = enumerated(points.astype(float), z, t)
        errors = ((x - mean) ** 2).mean(1)
        source, drawn, exact = (by_name[name, t] for name in estimators)
        assert source["mu_mse"] == pytest.approx(errors.mean(), rel=1e-5)
        assert source["mu_mse_se"] == pytest.approx(sem(errors), rel=1e-5)
        assert source["score_mse"] == pytest.approx(errors.mean() / t**4, rel=1e-5)
        # The sample variance of 200 repeats at 40 z has an error of a few per cent.
        assert drawn["mu_variance"] == pytest.approx(variance.mean() / n, rel=0.1)
        assert drawn["effective_sample_size"] == pytest.approx(n)
        assert exact["mu_mse"] < 1e-12
        assert exact["repeats"] == 1


def by_scipy(a, b):
    """The Fréchet distance of two arrays (N, F)."""
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(
        cov_a + cov_b - 2 * sqrtm(cov_a @ cov_b).real
    )


@pytest.mark.parametrize("hflip", [False, True])
def test_a_frechet_distance_is_one_call_and_that_of_scipy(hflip):
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, (300, 1, 4, 4), np.uint8)
    samples = torch.tensor(rng.normal(0.1, 0.4, (200, 1, 4, 4)), dtype=torch.float32)
    expected = pytest.approx(
        by_scipy(samples.flatten(1).double().numpy(), data.reshape(300, -1) / 127.5 - 1), rel=1e-6
    )
    reference, extractor = ReferenceSet(data, hflip=hflip), Pixels()
    assert frechet_distance(samples, reference, extractor) == expected
    assert frechet_distance(samples, data, extractor) == expected
    known = image_statistics(reference, extractor, batch_size=64)
    assert frechet_distance_of_statistics(image_statistics(samples, extractor), known) == expected
    # The callback gives the same number.
    assert FidelityMeasure(extractor)(reference, [(torch.arange(200), samples)], total=200) == {
        "fd_pixels": expected
    }
