"""The Wiener estimator against closed forms in float64 and its limits."""

import numpy as np
import pytest
import torch

from lit_knn.estimators import Wiener
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, noisy, rng

N, D = 300, 8


def skewed_vectors():
    """Random vectors with third cumulants that are not 0."""
    return (
        torch.empty(N, D).exponential_(generator=rng()) @ torch.randn(D, D, generator=rng(1)) / 3
        + 0.5
    )


@pytest.mark.parametrize("r", [1, 3, D])
@pytest.mark.parametrize("x", [low_rank_vectors(N, D), skewed_vectors()], ids=["normal", "skewed"])
def test_wiener_is_the_filter_of_a_low_rank_covariance(x, r):
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


@pytest.mark.parametrize("r", [1, 3, D])
def test_limits_are_z_and_the_mean_of_the_data(r):
    x = low_rank_vectors(N, D)
    estimator = Wiener(r=r).bind(ReferenceSet(x))
    z = noisy(x[:20], 1.0)
    torch.testing.assert_close(estimator.posterior_mean(z, 1e-4), z, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        estimator.posterior_mean(z, 1e5), x.mean(0).expand(20, D), rtol=0, atol=1e-6
    )
    # Without any variance, and at a noise whose square float32 cannot hold.
    same = Wiener(r=1).bind(ReferenceSet(x[:1].repeat(4, 1)))
    torch.testing.assert_close(
        same.posterior_mean(z, 1e-30), x[:1].expand(20, D), rtol=1e-5, atol=1e-5
    )
