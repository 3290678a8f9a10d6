"""The Wiener estimator against closed forms in float64, its limits, and the expansion at large noise."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from lit_knn.estimators import Wiener
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from tests.toys import low_rank_vectors, noisy

N, D = 300, 8


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def skewed_vectors():
    """Random vectors with third cumulants that are not 0."""
    return torch.empty(N, D).exponential_(generator=rng()) @ torch.randn(D, D, generator=rng(1)) / 3 + 0.5


@pytest.mark.parametrize("r", [1, 3, D])
@pytest.mark.parametrize("x", [low_rank_vectors(N, D), skewed_vectors()], ids=["normal", "skewed"])
def test_it_is_the_filter_of_the_covariance_with_one_variance_outside_the_components(x, r):
    data, t = x.double().numpy(), np.array([0.01, 0.2, 1.0, 5.0, 80.0])
    mean, (variances, axes) = data.mean(0), np.linalg.eigh(np.cov(data.T, bias=True))
    if r < D:
        variances[: D - r] = variances[: D - r].mean()
    z = noisy(x[: len(t)], torch.from_numpy(t))
    shares = variances / (variances + t[:, None] ** 2)
    expected = mean + (shares * ((z.double().numpy() - mean) @ axes)) @ axes.T
    ours = Wiener(r=r).bind(ReferenceSet(x)).posterior_mean(z, torch.from_numpy(t))
    # Components of float32; z reaches 200.
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


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
    # Without any variance, and at a noise whose square float32 cannot hold.
    same = Wiener(r=1).bind(ReferenceSet(x[:1].repeat(4, 1)))
    torch.testing.assert_close(same.posterior_mean(z, 1e-30), x[:1].expand(20, D), rtol=1e-5, atol=1e-5)
