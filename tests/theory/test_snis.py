"""Self-normalised importance sampling (Eq. 11, eq:SNIS_estimator) against its own variance (Eq. 12) and plain loops."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

from lit_knn.theory.proposal import neighbour_proposal, sample_proposal
from lit_knn.theory.snis import snis_variance, snis_weights, weighted_mean

N, D, K = 40, 3, 10


def toy(t=1.0, seed=0):
    """A data set, one latent, their log-likelihoods and the posterior by NumPy."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, D))
    z = x[0] + 0.5 * rng.normal(size=D)
    sq_dist = ((z - x) ** 2).sum(1)
    log_p = -sq_dist / (2 * t**2)
    return x, sq_dist, log_p, softmax(log_p)


def draw(kind, sq_dist, t, R, n, seed):
    """R independent batches of n ids, their log q, and q of all N images."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "uniform":
        ids = torch.randint(N, (R, n), generator=generator)
        return ids, torch.full((R, n), -np.log(N), dtype=torch.float64), np.full(N, 1 / N)
    order = np.argsort(sq_dist)[:K]
    found = torch.tensor(sq_dist[order])
    if kind == "wrong":
        # The search is wrong, so q is another distribution, and the weights must correct it.
        found = found.flip(0) + 0.3
    proposal = neighbour_proposal(found[None], torch.tensor(order)[None], t, N)
    ids, log_q = sample_proposal(proposal, R * n, generator)
    q = np.full(N, np.exp(proposal.log_q_tail.item()))
    q[order] = proposal.log_q.exp()[0].numpy()
    return ids.reshape(R, n), log_q.reshape(R, n), q


def estimates(ids, log_q, log_p, x):
    weights = snis_weights(torch.tensor(log_p)[ids], log_q)
    return weighted_mean(weights, torch.tensor(x)[ids]).numpy()


@pytest.mark.parametrize("kind", ["uniform", "knn", "wrong"])
@pytest.mark.parametrize("t", [0.6, 1.5])
def test_mean_squared_error_is_eq_12(kind, t):
    x, sq_dist, log_p, posterior = toy(t)
    mu = posterior @ x
    for n, R in ((400, 4000), (1600, 1500)):
        ids, log_q, q = draw(kind, sq_dist, t, R, n, seed=n)
        predicted = sum(posterior[i] ** 2 / q[i] * (x[i] - mu) ** 2 for i in range(N)) / n
        squared_error = (estimates(ids, log_q, log_p, x) - mu) ** 2
        # Errors are summed over dimensions. The tolerance is 5 standard errors plus the formula's O(1/n) error.
        total = squared_error.sum(1)
        tolerance = 5 * total.std() / np.sqrt(R) + 0.02 * predicted.sum()
        assert tolerance < 0.2 * predicted.sum()
        assert abs(total.mean() - predicted.sum()) < tolerance


def test_snis_variance_equals_a_plain_loop():
    rng = np.random.default_rng(2)
    B, n = 3, 17
    posterior = softmax(rng.normal(size=(B, N)), axis=1)
    q = softmax(rng.normal(size=(B, N)), axis=1)
    x = rng.normal(size=(N, 2, 1, 2))
    expected = np.zeros((B, 2, 1, 2))
    for b in range(B):
        mu = sum(posterior[b, i] * x[i] for i in range(N))
        for i in range(N):
            expected[b] += posterior[b, i] ** 2 / q[b, i] * (x[i] - mu) ** 2 / n
    result = snis_variance(torch.tensor(posterior), torch.tensor(q), torch.tensor(x), n)
    np.testing.assert_allclose(result, expected, rtol=1e-12)


@pytest.mark.parametrize("offset", [0.0, -1e12, 1e12, -800.0, 800.0])
def test_weights_sum_to_one_whatever_the_log_likelihoods(offset):
    log_p = torch.tensor([[0.0, -1.0, -2.0], [0.0, -800.0, -1e9], [-1e9, -1e9, -1e9]], dtype=torch.float64) + offset
    weights = snis_weights(log_p, torch.zeros(3, 3, dtype=torch.float64))
    assert weights.isfinite().all()
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-12)
    expected = np.exp([0.0, -1.0, -2.0])
    np.testing.assert_allclose(weights[0], expected / expected.sum(), rtol=1e-3 if abs(offset) > 1e9 else 1e-9)
    np.testing.assert_allclose(weights[1], [1, 0, 0], atol=1e-300)
    np.testing.assert_allclose(weights[2], 1 / 3, rtol=1e-9)


def test_weights_are_likelihood_over_proposal():
    p, q = np.array([[0.5, 0.2, 0.1]]), np.array([[0.25, 0.6, 0.15]])
    expected = (p / q) / (p / q).sum()
    np.testing.assert_allclose(snis_weights(torch.tensor(np.log(p)), torch.tensor(np.log(q))), expected, rtol=1e-12)
    # A scalar log q means a uniform proposal; its value does not matter.
    np.testing.assert_allclose(snis_weights(torch.tensor(np.log(p)), 3.0), p / p.sum(), rtol=1e-12)
    # Draws from the posterior itself have equal weights (Eq. 9).
    np.testing.assert_allclose(snis_weights(torch.tensor(np.log(p)), torch.tensor(np.log(p))), 1 / 3, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_mean_equals_a_plain_loop(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 4, 4, dtype=dtype, generator=generator)
    weights = torch.rand(2, 5, dtype=torch.float64, generator=generator)
    weights /= weights.sum(1, keepdim=True)
    result = weighted_mean(weights, x)
    assert result.dtype == torch.float64
    for b in range(2):
        expected = sum(weights[b, i].item() * x[b, i].double().numpy() for i in range(5))
        np.testing.assert_allclose(result[b], expected, atol=1e-6 if dtype == torch.float32 else 1e-14)


def test_small_deviations_from_large_images_are_kept():
    # Rounded to float32, numbers near 1000 have steps of 6e-5.
    x = 1000 + torch.tensor([0.0, 2**-13, 2**-12]).reshape(1, 3, 1)
    mean = weighted_mean(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), x)
    assert mean.item() == pytest.approx(1000 + 0.7 * 2**-13, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 3, 64, 256, 1000])
def test_copies_of_one_image_have_it_as_their_mean_to_the_last_bit(dtype, n):
    generator = torch.Generator().manual_seed(n)
    weights = torch.softmax(4 * torch.randn(5, n, dtype=torch.float64, generator=generator), dim=1)
    weights[0] = 1 / n
    for scale in (1e-4, 1.0, 300.0):
        x = (scale * torch.randn(5, 1, 3, 4, generator=generator)).to(dtype).expand(-1, n, -1, -1)
        assert torch.equal(weighted_mean(weights, x), x[:, 0].double())
