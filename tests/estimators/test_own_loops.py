"""The targets that docs/library.md makes of a posterior mean, in the conventions of other training loops."""

import torch

from lit_knn.estimators import Exact
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import LinearInterpolant, per_item, under_process


def conditional_mean(values, z, means, std):
    """Return E[values | z] by enumeration: values (B, N, d) if z is N(means, std²) of one of N points, (N, d)."""
    sq_dist = (z[:, None] - means).square().sum(2)
    weights = (-sq_dist / (2 * std.square())).softmax(1)
    return (weights[:, :, None] * values).sum(1)


def test_targets_of_noise_and_velocity_are_conditional_means():
    data = torch.randn(20, 3)
    x, noise = data[torch.arange(8)], torch.randn(8, 3)
    estimator, points = Exact().bind(ReferenceSet(data)), data.double()

    sigma = torch.linspace(0.3, 3, 8)[:, None]
    z = x + sigma * noise
    epsilon = (z - estimator.posterior_mean(z, sigma.flatten())) / sigma
    noises = (z.double()[:, None] - points) / sigma[:, :, None]
    expected = conditional_mean(noises, z.double(), points, sigma.double())
    # Differences are float32 numbers of size 10 over noise levels of 0.3: 2^-24 · 10 / 0.3 is 2e-6.
    torch.testing.assert_close(epsilon.double(), expected, rtol=1e-5, atol=1e-5)

    # In torchcfm, x_t = (1 − t)·x0 + t·x1 goes from noise x0 to data x1, and the target is x1 − x0.
    t = torch.linspace(0.2, 0.9, 8)[:, None]
    x_t = (1 - t) * noise + t * x
    mean = under_process(estimator.posterior_mean, LinearInterpolant())
    velocity = (x_t - mean(x_t, 1 - t.flatten())) / per_item(1 - t.flatten(), x_t)
    x0 = (x_t.double()[:, None] - t[:, :, None] * points) / (1 - t)[:, :, None]
    means = t[:, :, None] * points
    expected = conditional_mean(points - x0, x_t.double(), means, (1 - t).double())
    torch.testing.assert_close(-velocity.double(), expected, rtol=1e-5, atol=1e-5)
