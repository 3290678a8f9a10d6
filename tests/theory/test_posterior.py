"""Eqs. 2 and 8 against SciPy, by enumeration in float64; `tests/estimators/test_score.py` has the score."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

from lit_knn.theory.posterior import cross_sq_dist, direct_sq_dist, log_posterior, posterior_mean

N, B, D = 7, 4, 3


def points(seed=0, spread=1.0):
    """N images, and B latents that are `spread` away from one of them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, D))
    return x, x[rng.integers(N, size=B)] + spread * rng.normal(size=(B, D))


def enumerated_posterior(z, x, t):
    """Eq. 2 from the differences z − x in float64."""
    z, x = np.float64(z), np.float64(x)
    return softmax(-((z[:, None] - x) ** 2).sum(2) / (2 * t**2), axis=1)


@pytest.mark.parametrize("far", [False, True])
def test_posterior_is_right_at_every_noise_level(far):
    t = np.array([0.002, 0.1, 2.0, 80.0])
    # Far from every x every likelihood underflows.
    x, z = points(seed=3, spread=1.0 if far else t[:, None])
    expected = enumerated_posterior(z, x, t[:, None])
    z, x, t = map(torch.tensor, (z, x, t))
    log_p = log_posterior(cross_sq_dist(z, x), t)
    assert log_p.isfinite().all()
    np.testing.assert_allclose(log_p.exp(), expected, rtol=1e-6, atol=1e-9)
    mean = posterior_mean(z.reshape(B, 1, D, 1), x.reshape(N, 1, D, 1), t)
    np.testing.assert_allclose(mean.flatten(1), expected @ x.numpy(), rtol=0, atol=1e-9)


def test_float32_input_does_not_lose_the_posterior_at_t_min():
    # If float32 expands the square, the error of the distance is many times 2t².
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 768, generator=generator)
    x[1] = x[0]
    x[1, 0] += 1e-3
    z = x[:2] + 0.002 * torch.randn(2, 768, generator=generator)
    expected = enumerated_posterior(z, x, 0.002)
    assert expected[0, 1] > 1e-4  # the near copy has weight
    np.testing.assert_allclose(log_posterior(cross_sq_dist(z, x), 0.002).exp(), expected, atol=1e-6)
    candidates = x.expand(2, *x.shape)
    np.testing.assert_allclose(
        log_posterior(direct_sq_dist(z, candidates), 0.002).exp(), expected, atol=2e-3
    )


@pytest.mark.parametrize("d", [1, 63, 64, 65, 3072])
def test_direct_distance_keeps_its_digits_near_x(d):
    # Weights depend on distances over 2t². A plain float32 sum of 3,072 squares has errors up to 3e-7.
    generator = torch.Generator().manual_seed(2)
    z, away = torch.rand(2, d, generator=generator), torch.rand(2, 50, d, generator=generator)
    x = z.unsqueeze(1) + away * torch.logspace(-4, 0, 50).unsqueeze(1)
    result = direct_sq_dist(z, x)
    assert result.dtype == torch.float64
    # Float32 rounds each difference by itself.
    np.testing.assert_allclose(
        result, (x - z.unsqueeze(1)).double().square().sum(2), rtol=1e-7 if d == 3072 else 3e-7
    )
    assert direct_sq_dist(z[:0], x[:0]).shape == (0, 50)
