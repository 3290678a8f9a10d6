"""Density, coverage and tests for copies against published code, SciPy and closed forms."""

import numpy as np
import pytest
import torch
from prdc import compute_prdc
from scipy.stats import mannwhitneyu
from sklearn.neighbors import NearestNeighbors

from lit_knn.common.errors import InputError
from lit_knn.metrics import sample_quality
from lit_knn.metrics.sample_quality import (
    copying_score,
    density_and_coverage,
    is_authentic,
    rank_sum_score,
)


def features(number, seed, width=6, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, width, generator=generator) + shift


@pytest.mark.parametrize("block", [1, 2**28])
@pytest.mark.parametrize(("k", "shift"), [(1, 0.0), (5, 0.4), (5, 3.0)])
def test_density_and_coverage_are_those_of_the_authors_code(k, shift, block, monkeypatch):
    monkeypatch.setattr(sample_quality, "BLOCK_BYTES", block)
    generated, real = features(150, 0, shift=shift), features(120, 1)
    expected = compute_prdc(real.double().numpy(), generated.double().numpy(), nearest_k=k)
    measured = density_and_coverage(generated, real, k)
    assert measured["density"] == pytest.approx(expected["density"], abs=1e-9)
    assert measured["coverage"] == pytest.approx(expected["coverage"], abs=1e-9)


def test_coverage_of_the_same_law_is_its_expectation():
    # M generated images miss a ball of k neighbours with the probability of k more images than M in a row, about 2^−k.
    generated, real = features(4000, 2, width=3), features(4000, 3, width=3)
    measured = density_and_coverage(generated, real, k=3)
    assert measured["coverage"] == pytest.approx(1 - 0.5**3, abs=0.02)
    assert measured["density"] == pytest.approx(1, abs=0.03)


def test_k_beyond_the_real_images_is_refused():
    with pytest.raises(InputError, match="need more than 5 real images, got 5"):
        density_and_coverage(features(9, 0), features(5, 1))


def test_authentic_share_is_that_of_sklearns_neighbours():
    training, generated = features(200, 4), features(150, 5)
    generated[:40] = training[:40] + 1e-3
    search = NearestNeighbors(n_neighbors=2).fit(training.numpy())
    distance, nearest = search.kneighbors(generated.numpy(), 1)
    spacing = search.kneighbors(training.numpy())[0][:, 1]
    expected = np.mean(distance[:, 0] > spacing[nearest[:, 0]])
    assert float(is_authentic(generated, training).double().mean()) == pytest.approx(expected)
    assert not is_authentic(training + 1e-4, training).any()


@pytest.mark.parametrize("shift", [-1.0, 0.0, 0.5])
def test_rank_sum_score_is_that_of_scipy(shift):
    first, second = features(60, 6, width=1)[:, 0] + shift, features(45, 7, width=1)[:, 0]
    first[:5] = second[:5]
    statistic = mannwhitneyu(first.numpy(), second.numpy()).statistic
    expected = (statistic - 60 * 45 / 2) / np.sqrt(60 * 45 * 106 / 12)
    assert rank_sum_score(first, second) == pytest.approx(expected, rel=1e-9)


def test_copies_score_far_below_0_and_new_samples_about_0():
    training, held_out = features(600, 8), features(400, 9)
    assert abs(copying_score(features(400, 10), training, held_out)) < 3
    assert copying_score(training[:400] + 0.05, training, held_out) < -3
    assert copying_score(features(400, 11, shift=2.0), training, held_out) > 3


def test_too_few_images_for_a_copying_score_are_refused():
    with pytest.raises(InputError, match="C_T needs 20 generated and held-out images"):
        copying_score(features(50, 0), features(50, 1), features(19, 2))
