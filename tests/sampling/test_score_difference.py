"""The difference of two smoothed scores: closed forms of Gaussians, its bias, levels in strata."""

import math

import pytest
import torch

from lit_knn.estimators import Exact
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.score_difference import score_difference, stratified_levels
from tests.toys import rng

DATA, SAMPLES = (0.5, 0.8), (-0.3, 0.4)  # mean and deviation of two Gaussians


def gaussian_mean(z, t, mean, std):
    """E[x|z, t] of Gaussian data."""
    gain = std**2 / (std**2 + t**2)
    return mean + gain[:, None] * (z - mean)


def drawn(number, mean, std, seed):
    return mean + std * torch.randn(number, 1, generator=rng(seed))


def exact(x):
    return Exact().bind(ReferenceSet(x)).posterior_mean


def test_difference_of_two_gaussians_has_its_closed_form():
    x, noise = drawn(4000, *SAMPLES, seed=1), torch.randn(4000, 1, generator=rng(2))
    t = torch.full((4000,), 0.7, dtype=torch.float64)
    V = score_difference(
        x, t, noise, exact(drawn(20_000, *DATA, 3)), exact(drawn(20_000, *SAMPLES, 4))
    )
    z = x + 0.7 * noise
    closed = gaussian_mean(z.double(), t, *DATA) - gaussian_mean(z.double(), t, *SAMPLES)
    # Sets of 20,000 points: both means have errors of about 1 %, and more far from the points.
    assert (V - closed).square().mean().sqrt() < 0.02
    # The mean of −V/t² is the derivative of the divergence of the smoothed Gaussians by the samples' mean.
    slope = (SAMPLES[0] - DATA[0]) / (DATA[1] ** 2 + 0.49)
    assert -V.mean().item() / 0.49 == pytest.approx(slope, abs=0.05)


def mean_difference(num_data, num_samples):
    """The mean of V at fresh points, and its standard error, over sets of one skewed law."""
    means = []
    for seed in range(300):
        x = torch.empty(num_data + num_samples + 64, 1).exponential_(generator=rng(seed))
        data, samples, fresh = x.split([num_data, num_samples, 64])
        t = torch.full((64,), 0.3, dtype=torch.float64)
        noise = torch.randn(64, 1, generator=rng(1000 + seed))
        means.append(score_difference(fresh, t, noise, exact(data), exact(samples)).mean())
    means = torch.stack(means)
    return means.mean().item(), means.std().item() / len(means) ** 0.5


def test_equal_laws_have_no_mean_difference_with_equal_numbers():
    mean, error = mean_difference(12, 12)
    assert abs(mean) < 4 * error
    # A smaller set has an image near fewer points, and the law is skewed.
    mean, error = mean_difference(12, 192)
    assert abs(mean) > 4 * error


def test_levels_lie_in_strata_and_are_uniform_in_the_logarithm():
    ends, (levels, samples) = NoiseGrid(0.5, 8.0), (4, 50)
    t = stratified_levels(samples, levels, ends, rng())
    uniform = (t / 0.5).log() / math.log(16)
    # Each sample has a level in each quarter, and the batch has one in each of 200 parts.
    assert torch.equal(
        (levels * uniform).floor(), torch.arange(4.0).double()[:, None].expand(4, 50)
    )
    assert sorted((200 * uniform).floor().flatten().tolist()) == list(range(200))
    # Which sample has which level is drawn anew, in each quarter apart from the others.
    again = (stratified_levels(samples, levels, ends, rng(1)) / 0.5).log() / math.log(16)
    assert not torch.equal(again.argsort(1), uniform.argsort(1))
    assert not torch.equal(uniform[0].argsort(), uniform[1].argsort())
