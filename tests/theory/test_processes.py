"""Noise processes: derivatives, marginals, velocities along the exact flow of a Gaussian, estimators in any process."""

import math

import numpy as np
import pytest
import torch

from lit_knn.theory.noise import EDM, VP, LinearInterpolant, Process, forward_noise, under_process
from tests.gaussian_flow import gaussian_mean, trajectory

PROCESSES = [EDM(), VP(), VP(beta_d=0.0, beta_min=2.0), LinearInterpolant()]
TIMES = torch.tensor([0.01, 0.1, 0.3, 0.5, 0.8, 0.99], dtype=torch.float64)
every_process = pytest.mark.parametrize(
    "process", PROCESSES, ids=lambda p: f"{type(p).__name__}{vars(p) or ''}"
)


@every_process
def test_closed_forms_agree_with_autograd_and_inverse(process):
    for value, derivative in (
        (process.sigma, process.sigma_derivative),
        (process.scale, process.scale_derivative),
    ):
        expected = torch.func.jvp(value, (TIMES,), (torch.ones_like(TIMES),))[1]
        np.testing.assert_allclose(derivative(TIMES), expected, rtol=1e-12)
    assert (process.sigma(torch.zeros(1)).item(), process.scale(torch.zeros(1)).item()) == (0, 1)
    assert (process.sigma(TIMES).diff() > 0).all()
    np.testing.assert_allclose(process.t_of_sigma(process.sigma(TIMES)), TIMES, rtol=1e-12)
    sigma = torch.tensor([1e-6, 0.002, 0.5, 80.0, 150.0], dtype=torch.float64)
    np.testing.assert_allclose(process.sigma(process.t_of_sigma(sigma)), sigma, rtol=1e-9)


def test_process_of_sigma_and_scale_alone_has_precise_rest():
    class Own(Process):
        sigma, scale = VP.sigma, VP.scale
        beta_d, beta_min, _u = 19.9, 0.1, VP._u

    t = torch.logspace(-3, 0, 20, dtype=torch.float64)
    for name, value in (
        ("t_of_sigma", VP().sigma(t)),
        ("sigma_derivative", t),
        ("scale_derivative", t),
    ):
        np.testing.assert_allclose(
            getattr(Own(), name)(value), getattr(VP(), name)(value), rtol=1e-12
        )


def test_forward_marginals_by_hand():
    x, noise, t = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]]), 0.25
    np.testing.assert_allclose(forward_noise(x, t, noise, LinearInterpolant()), [[1.5, 1.0]])
    # VP preserves variance: data of variance 1 keep variance 1.
    keep = math.exp(-0.5 * (19.9 / 2 * t**2 + 0.1 * t))
    np.testing.assert_allclose(
        forward_noise(x, t, noise, VP()), [[2 * keep, 4 * math.sqrt(1 - keep**2)]], rtol=1e-6
    )
    np.testing.assert_allclose(forward_noise(x, t, noise), [[2.0, 1.0]])
    # The straight path goes from the data to the noise.
    np.testing.assert_array_equal(forward_noise(x, 0.0, noise, LinearInterpolant()), x)
    np.testing.assert_array_equal(forward_noise(x, 1.0, noise, LinearInterpolant()), noise)


@every_process
def test_velocity_is_the_derivative_along_the_flow_of_a_gaussian(process):
    c = torch.randn(5, 3, dtype=torch.float64)
    for t in TIMES:
        z, expected = torch.func.jvp(
            lambda t: trajectory(process, c, t), (t,), (torch.ones_like(t),)
        )
        mu = under_process(gaussian_mean, process)(z, t)
        np.testing.assert_allclose(process.velocity(z, t, mu), expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(
            process.mean_of_velocity(z, t, expected), mu, rtol=1e-9, atol=1e-9
        )
