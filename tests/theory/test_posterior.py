"""Eqs. 1, 2, 5 and 8 against SciPy's normal density and against exact decimal arithmetic."""

import decimal
import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from lit_knn.theory.noise import EDM_PROCESS, forward_noise, per_item
from lit_knn.theory.posterior import (
    cross_sq_dist,
    direct_sq_dist,
    log_likelihood,
    log_marginal,
    log_posterior,
    mean_from_score,
    posterior_mean,
    score_from_mean,
    unnormalised_log_likelihood,
)

N, B, D = 7, 4, 3
NOISE_LEVELS = [0.002, 0.01, 0.1, 0.5, 2.0, 10.0, 80.0]


def points(seed=0, n=N, b=B, d=D, spread=1.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    z = x[rng.integers(n, size=b)] + spread * rng.normal(size=(b, d))
    return x, z


def scipy_log_densities(z, x, t):
    """log N(z_b; x_i, t²I), (B, N), by SciPy."""
    return np.array([[multivariate_normal(mean=xi, cov=t**2 * np.eye(len(xi))).logpdf(zb) for xi in x] for zb in z])


def sq_dist_of(z, x):
    return torch.tensor([[float(sum((zb - xi) ** 2)) for xi in x] for zb in z], dtype=torch.float64)


def decimal_posterior(z, x, t):
    """Compute Eq. 2 with 60 digits, so it never underflows and needs no log-space tricks, unlike the code."""
    with decimal.localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, decimal.MIN_EMIN, decimal.MAX_EMAX
        D_ = decimal.Decimal
        rows = []
        for zb in z:
            sq = [sum((D_(float(a)) - D_(float(c))) ** 2 for a, c in zip(zb, xi, strict=True)) for xi in x]
            likelihood = [(-s / (2 * D_(t) ** 2)).exp() for s in sq]
            total = sum(likelihood)
            rows.append([float(value / total) for value in likelihood])
    return np.array(rows)


@pytest.mark.parametrize("t", [0.1, 1.0, 10.0])
def test_likelihood_marginal_and_posterior_match_scipy(t):
    x, z = points(spread=t)
    log_densities = scipy_log_densities(z, x, t)
    sq_dist = sq_dist_of(z, x)
    marginal = logsumexp(log_densities, axis=1) - math.log(N)
    np.testing.assert_allclose(log_likelihood(sq_dist, t, D), log_densities, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(log_marginal(sq_dist, t, D), marginal, rtol=1e-10, atol=1e-10)
    # This is the paper's form of Eq. 2, with p_data = 1/N and Eq. 1's p_t(z).
    posterior = np.exp(log_densities) / (N * np.exp(marginal)[:, None])
    np.testing.assert_allclose(log_posterior(sq_dist, t).exp(), posterior, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("t", NOISE_LEVELS)
def test_posterior_is_right_at_every_noise_level(t):
    for spread in (t, 1.0):  # z from the process, and z so far from every x that every likelihood underflows
        x, z = points(seed=3, spread=spread)
        expected = decimal_posterior(z, x, t)
        log_p = log_posterior(cross_sq_dist(torch.tensor(z), torch.tensor(x)), t)
        assert log_p.isfinite().all()
        np.testing.assert_allclose(log_p.exp().sum(1), 1.0, rtol=1e-12)
        np.testing.assert_allclose(log_p.exp(), expected, rtol=1e-6, atol=1e-9)
        mean = posterior_mean(torch.tensor(z), torch.tensor(x), t)
        np.testing.assert_allclose(mean, expected @ x, rtol=0, atol=1e-9)


def test_float32_input_does_not_lose_the_posterior_at_t_min():
    # If float32 expands the square, the error of the distance is many times 2t².
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 768, generator=generator)
    x[1] = x[0]
    x[1, 0] += 1e-3
    z = x[:2] + 0.002 * torch.randn(2, 768, generator=generator)
    expected = decimal_posterior(z.double().numpy(), x.double().numpy(), 0.002)
    assert expected[0, 1] > 1e-4  # the near copy has weight
    np.testing.assert_allclose(log_posterior(cross_sq_dist(z, x), 0.002).exp(), expected, atol=1e-6)
    candidates = x.expand(2, *x.shape)
    np.testing.assert_allclose(log_posterior(direct_sq_dist(z, candidates), 0.002).exp(), expected, atol=2e-3)


def test_direct_distance_keeps_its_digits_close_to_x():
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(3, 1, 16, 16, generator=generator)
    x = z.unsqueeze(1) + torch.tensor([1e-4, 1e-2, 1.0]).reshape(1, 3, 1, 1, 1)
    expected = (x.double() - z.double().unsqueeze(1)).square().sum((2, 3, 4))
    result = direct_sq_dist(z, x)
    assert result.shape == (3, 3)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result, expected, rtol=2e-6)


@pytest.mark.parametrize("d", [1, 63, 64, 65, 3072])
def test_direct_distance_of_many_terms_does_not_drift(d):
    # Weights depend on distances over 2t². A plain float32 sum of 3,072 squares has errors up to 3e-7.
    generator = torch.Generator().manual_seed(2)
    x, z = (torch.rand(*size, d, generator=generator) for size in ((2, 50), (2,)))
    expected = (x.double() - z.double().unsqueeze(1)).square().sum(2)
    # Each difference is rounded by itself.
    np.testing.assert_allclose(direct_sq_dist(z, x), expected, rtol=1e-7 if d == 3072 else 3e-7)
    for empty in (direct_sq_dist(z, x[:, :0]), direct_sq_dist(z[:0], x[:0])):
        assert empty.numel() == 0


@pytest.mark.parametrize("t", [0.3, 1.0, 4.0])
def test_score_is_the_gradient_of_log_p(t):
    x, z = points(seed=5)
    mu = posterior_mean(torch.tensor(z), torch.tensor(x), t)
    score = score_from_mean(mu, torch.tensor(z), t)

    def log_p(point):
        return logsumexp(scipy_log_densities(point[None], x, t)[0]) - math.log(N)

    h = 1e-5
    for b in range(B):
        gradient = [(log_p(z[b] + h * e) - log_p(z[b] - h * e)) / (2 * h) for e in np.eye(D)]
        np.testing.assert_allclose(score[b], gradient, rtol=1e-6, atol=1e-7)
    velocity = EDM_PROCESS.velocity(torch.tensor(z), torch.tensor(t, dtype=torch.float64), mu)
    np.testing.assert_allclose(velocity, -t * score, rtol=1e-12)  # Eq. 3
    np.testing.assert_allclose(mean_from_score(score, torch.tensor(z), t), mu, rtol=1e-12)


def test_per_item_noise_levels_equal_separate_calls():
    x, z = points(seed=9)
    x, z = torch.tensor(x).reshape(N, 1, 3, 1), torch.tensor(z).reshape(B, 1, 3, 1)
    t = torch.tensor([0.1, 0.7, 3.0, 80.0])
    noise = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for function in (
        lambda z, t: posterior_mean(z, x, t),
        lambda z, t: score_from_mean(2 * z, z, t),
        lambda z, t: mean_from_score(2 * z, z, t),
        lambda z, t: EDM_PROCESS.velocity(z, per_item(t, z), 2 * z),
        lambda z, t: forward_noise(z, t, noise[: len(z)]) - forward_noise(z, 0.0, noise[: len(z)]),
        lambda z, t: log_marginal(cross_sq_dist(z.flatten(1), x.flatten(1)), t, 3),
        lambda z, t: unnormalised_log_likelihood(cross_sq_dist(z.flatten(1), x.flatten(1)), t),
    ):
        together = function(z, t)
        for b in range(B):
            alone = function(z, t[b])[b]  # the whole batch at the noise level of item b
            np.testing.assert_allclose(together[b], alone, rtol=1e-6, atol=1e-12)
