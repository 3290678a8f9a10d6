"""Noised against means and covariances that are enumerated in float64."""

import pytest
import torch

from lit_knn.estimators import ByClass, Exact, Noised, PatchPosterior
from lit_knn.reference import ReferenceSet
from tests.toys import rng, speckles

IMAGES, T, DRAWS = speckles(9, (1, 2, 2)), 0.6, 10_000


@pytest.fixture
def reference():
    return ReferenceSet(IMAGES, labels=torch.arange(9) % 2)


def vectors(reference):
    return reference.gather(torch.arange(reference.N)).flatten(1).double()


def one_latent(reference):
    """A latent between the images, many times: (DRAWS, 1, 2, 2)."""
    z = reference.gather(torch.tensor([4])) + T * torch.randn(1, 1, 2, 2, generator=rng(3))
    return z.expand(DRAWS, -1, -1, -1)


def weights_at(z, x):
    """The posterior of latents z (B, d) over x (N, d): (B, N)."""
    sq_dist = (z.double()[:, None] - x).square().sum(2)
    return (-sq_dist / (2 * T**2)).softmax(1)


def covariances(weights, x):
    """The covariances of x (N, d) under each row of weights (B, N): (B, d, d)."""
    mean = weights @ x
    second = torch.einsum("bn,nd,ne->bde", weights, x, x)
    return second - mean[:, :, None] * mean[:, None]


def covariance_of_random_latents(x):
    """The posterior's covariance averaged over 50,000 latents, (d, d)."""
    ids = torch.randint(len(x), (50_000,), generator=rng(7))
    z = x[ids] + T * torch.randn(len(ids), x.shape[1], dtype=torch.float64, generator=rng(8))
    return covariances(weights_at(z, x), x).mean(0)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("covariance", ["posterior", "isotropic", "shuffled"])
def test_mean_and_covariance_equal_enumeration(covariance, scale, reference):
    x, z = vectors(reference), one_latent(reference)
    weights = weights_at(z[:1].flatten(1), x)
    expected = covariances(weights, x)[0]
    assert expected.trace() > 0.1
    if covariance == "isotropic":
        expected = torch.eye(4, dtype=torch.float64) * expected.trace() / 4
    if covariance == "shuffled":
        expected = covariance_of_random_latents(x)

    estimator = Noised(Exact(), covariance, scale).bind(reference)
    draws = estimator.posterior_mean(z, T, None, rng()).flatten(1).double()

    noise = draws - weights @ x
    products = noise[:, :, None] * noise[:, None]
    # Five standard errors for each of 4 + 16 numbers, and the rounding of float32.
    error = 5 * noise.std(0) / DRAWS**0.5 + 1e-6
    assert (noise.mean(0).abs() < error).all()
    error = 5 * products.std(0) / DRAWS**0.5 + 1e-6
    assert ((products.mean(0) - scale**2 * expected).abs() < error).all()


def test_posterior_noise_of_scale_one_is_one_sample_in_law(reference):
    x, z = vectors(reference), one_latent(reference)
    estimator = Noised(Exact(), "posterior", 1.0).bind(reference)
    draws = estimator.posterior_mean(z, T, None, rng()).flatten(1).double()
    distance, ids = torch.cdist(draws, x).min(1)
    assert distance.max() < 1e-5  # Each estimate is an image.
    expected = weights_at(z[:1].flatten(1), x)[0]
    share = ids.bincount(minlength=9) / DRAWS
    error = 5 * (expected * (1 - expected) / DRAWS).sqrt()
    assert ((share - expected).abs() < error).all()


@pytest.mark.parametrize("covariance", ["posterior", "isotropic"])
def test_noise_around_the_exact_mean_joins_another_estimate(covariance, reference):
    z = one_latent(reference)
    local = PatchPosterior(1).bind(reference).posterior_mean(z[:1], T)
    exact = Exact().bind(reference).posterior_mean(z[:1], T)
    assert (local - exact).abs().max() > 0.01

    def draws(estimator):
        return Noised(estimator, covariance, 1.0).bind(reference).posterior_mean(z, T, None, rng())

    shift = draws(PatchPosterior(1)) - draws(Exact())
    torch.testing.assert_close(shift, (local - exact).expand_as(z), atol=1e-5, rtol=0)


@pytest.mark.parametrize("covariance", ["posterior", "isotropic", "shuffled", "none"])
def test_scale_multiplies_the_noise_alone(covariance, reference):
    z = one_latent(reference)[:50]
    exact = Exact().bind(reference).posterior_mean(z, T)

    def noise(scale):
        estimator = Noised(Exact(), covariance, scale).bind(reference)
        return estimator.posterior_mean(z, T, None, rng()) - exact

    assert not noise(0.0).any()
    torch.testing.assert_close(noise(2.0), 2 * noise(1.0), atol=1e-5, rtol=0)
    assert noise(1.0).any() == (covariance != "none")


def test_by_class_the_noise_is_that_of_the_class(reference):
    x, z, labels = vectors(reference), one_latent(reference)[:200], torch.arange(200) % 2
    estimator = ByClass(Noised(Exact(), "posterior", 1.0)).bind(reference)
    draws = estimator.posterior_mean(z, T, None, rng(), labels=labels).flatten(1).double()
    distance, ids = torch.cdist(draws, x).min(1)
    assert distance.max() < 1e-5
    assert torch.equal(ids % 2, labels)
