"""The Wiener estimator against closed forms in float64, least squares, and the expansion at large noise."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from lit_knn.estimators import Wiener
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import VP, under_process
from lit_knn.theory.posterior import posterior_mean
from tests.toys import low_rank_vectors, noisy

N, D = 300, 8


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def skewed_vectors():
    """Random vectors with third cumulants that are not 0."""
    return torch.empty(N, D).exponential_(generator=rng()) @ torch.randn(D, D, generator=rng(1)) / 3 + 0.5


@pytest.mark.parametrize("t", [0.01, 0.3, 1.0, 5.0, 80.0])
@pytest.mark.parametrize("x", [low_rank_vectors(N, D), skewed_vectors()], ids=["normal", "skewed"])
def test_all_components_give_the_filter_of_the_full_covariance(x, t):
    z = noisy(x[:50], t)
    data = x.double().numpy()
    mean, covariance = data.mean(0), np.cov(data.T, bias=True)
    gain = covariance @ np.linalg.inv(covariance + t**2 * np.eye(D))
    expected = mean + (z.double().numpy() - mean) @ gain.T
    ours = Wiener(r=D).bind(ReferenceSet(x)).posterior_mean(z, t)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def error_at_large_t(x, r, t, num_latents=20_000):
    """The mean squared distance to the exact mean, over the noise; in float64 as far as possible."""
    source = x[torch.randint(len(x), (num_latents,), generator=rng(4))]
    z = noisy(source, t, seed=5).double()
    ours = Wiener(r=r).bind(ReferenceSet(x)).posterior_mean(z, t).double()
    return (ours - posterior_mean(z, x, t)).square().sum(1).mean().item()


def order(errors, ratio):
    return [-math.log(b / a) / math.log(ratio) for a, b in pairwise(errors)]


def test_error_falls_with_the_fourth_power_by_the_third_cumulants():
    x = skewed_vectors()
    centred = (x - x.mean(0)).double()
    cumulants = torch.einsum("ni,nj,nk->ijk", centred, centred, centred) / N
    levels = (20.0, 40.0, 80.0)
    errors = [error_at_large_t(x, D, t) for t in levels]
    assert order(errors, 2) == pytest.approx([4, 4], abs=0.3)
    assert errors[-1] == pytest.approx((cumulants.square().sum() / 2 / levels[-1] ** 4).item(), rel=0.1)


def test_error_of_few_components_falls_with_the_square():
    # The remainder has two variances, the estimator only one, so (S − c)z/t² is of order 1/t.
    x = torch.randn(N, D, generator=rng()) * torch.tensor([4.0, 3.0, 2.0, 2.0, 2.0, 0.1, 0.1, 0.1])
    errors = [error_at_large_t(x, 2, t) for t in (50.0, 100.0, 200.0)]
    assert order(errors, 2) == pytest.approx([2, 2], abs=0.2)


@pytest.mark.parametrize("r", [1, 3, D])
def test_limits_are_z_and_the_mean_of_the_data(r):
    x = low_rank_vectors(N, D)
    estimator = Wiener(r=r).bind(ReferenceSet(x))
    z = noisy(x[:20], 1.0)
    torch.testing.assert_close(estimator.posterior_mean(z, 1e-4), z, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(estimator.posterior_mean(z, 1e5), x.mean(0).expand(20, D), rtol=0, atol=1e-6)
    torch.testing.assert_close(estimator.posterior_mean(x.mean(0, keepdim=True), 1.0), x.mean(0, keepdim=True))


def test_one_variance_serves_all_directions_outside_the_components():
    x, t, r = low_rank_vectors(N, D), 0.2, 3
    eigenvalues, vectors = np.linalg.eigh(np.cov(x.double().numpy().T, bias=True))
    outside, along = vectors[:, : D - r], vectors[:, D - r :]
    c = eigenvalues[: D - r].mean()
    gain = outside @ outside.T * c / (c + t**2)
    gain += along @ np.diag(eigenvalues[D - r :] / (eigenvalues[D - r :] + t**2)) @ along.T
    z = noisy(x[:20], t)
    mean = x.double().numpy().mean(0)
    expected = mean + (z.double().numpy() - mean) @ gain
    ours = Wiener(r=r).bind(ReferenceSet(x)).posterior_mean(z, t)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_noise_levels_belong_to_their_items_also_under_another_process():
    x = low_rank_vectors(N, D)
    estimator = Wiener(r=4).bind(ReferenceSet(x))
    t = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)
    z = noisy(x[:3], t)
    rows = torch.cat([estimator.posterior_mean(z[i : i + 1], t[i].item()) for i in range(3)])
    torch.testing.assert_close(estimator.posterior_mean(z, t), rows)
    process, s = VP(), torch.full((3,), 0.4, dtype=torch.float64)
    scaled = under_process(estimator.posterior_mean, process)(z, s)
    expected = estimator.posterior_mean((z / process.scale(s)[:, None]).float(), process.sigma(s))
    torch.testing.assert_close(scaled, expected)
