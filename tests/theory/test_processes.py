"""Noise processes: derivatives, marginals, PF-ODE velocities of a closed-form flow, estimators in any process."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from lit_knn.estimators import KNN, Exact
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, Process, forward_noise, under_process

PROCESSES = [EDM(), VP(), VP(beta_d=0.0, beta_min=2.0), LinearInterpolant()]
TIMES = torch.tensor([0.01, 0.1, 0.3, 0.5, 0.8, 0.99], dtype=torch.float64)
every_process = pytest.mark.parametrize("process", PROCESSES, ids=lambda p: f"{type(p).__name__}{vars(p) or ''}")

# Data N(M, S² I): p(z) = N(s·M, s²·(S² + σ²) I), so the PF-ODE keeps (z/s − M) / sqrt(S² + σ²).
M, S = 0.7, 0.5


def gaussian_mean(y, sigma):
    """The posterior mean E[x | x + σε = y]."""
    sigma = sigma.reshape(-1, *[1] * (y.ndim - 1))
    return (S**2 * y + sigma**2 * M) / (S**2 + sigma**2)


def gaussian_flow(z, t, t_next, process):
    (s, s_next), (sigma, sigma_next) = (
        process.scale(torch.stack([t, t_next])),
        process.sigma(torch.stack([t, t_next])),
    )
    return s_next * (M + (z / s - M) * torch.sqrt((S**2 + sigma_next**2) / (S**2 + sigma**2)))


@every_process
def test_derivatives(process):
    for value, derivative in ((process.sigma, process.sigma_derivative), (process.scale, process.scale_derivative)):
        central = (value(TIMES + 1e-6) - value(TIMES - 1e-6)) / 2e-6
        np.testing.assert_allclose(derivative(TIMES), central, rtol=1e-6, atol=1e-9)
        t = TIMES.clone().requires_grad_()
        # EDM's scale(t) does not depend on t.
        output = value(t).sum() + 0 * t.sum()
        np.testing.assert_allclose(derivative(TIMES), torch.autograd.grad(output, t)[0], rtol=1e-12)


@every_process
def test_the_noise_level_grows_from_zero_and_has_an_inverse(process):
    assert process.sigma(torch.zeros(1)).item() == 0
    assert process.scale(torch.zeros(1)).item() == 1
    assert (process.sigma(TIMES).diff() > 0).all()
    np.testing.assert_allclose(process.t_of_sigma(process.sigma(TIMES)), TIMES, rtol=1e-12)
    sigma = torch.tensor([1e-6, 0.002, 0.5, 80.0, 150.0], dtype=torch.float64)
    np.testing.assert_allclose(process.sigma(process.t_of_sigma(sigma)), sigma, rtol=1e-9)


def test_vp_by_the_formulas_of_the_appendix():
    t = 0.6
    rate = math.exp(19.9 / 2 * t**2 + 0.1 * t)
    t = torch.tensor(t, dtype=torch.float64)
    assert VP().sigma(t).item() == pytest.approx(math.sqrt(rate - 1))
    assert VP().scale(t).item() == pytest.approx(1 / math.sqrt(rate))
    # VP preserves variance: data of variance 1 keep variance 1.
    np.testing.assert_allclose(VP().scale(TIMES) ** 2 * (1 + VP().sigma(TIMES) ** 2), 1, rtol=1e-12)


def test_forward_marginals_by_hand():
    x, noise, t = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]]), 0.25
    np.testing.assert_allclose(forward_noise(x, t, noise, LinearInterpolant()), [[1.5, 1.0]])
    keep = math.exp(-0.5 * (19.9 / 2 * t**2 + 0.1 * t))
    np.testing.assert_allclose(forward_noise(x, t, noise, VP()), [[2 * keep, 4 * math.sqrt(1 - keep**2)]], rtol=1e-6)
    np.testing.assert_allclose(forward_noise(x, t, noise), [[2.0, 1.0]])
    # The straight path goes from the data to the noise.
    np.testing.assert_array_equal(forward_noise(x, 0.0, noise, LinearInterpolant()), x)
    np.testing.assert_array_equal(forward_noise(x, 1.0, noise, LinearInterpolant()), noise)


@every_process
def test_velocity_is_the_derivative_of_the_gaussian_flow(process):
    z = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = under_process(gaussian_mean, process)
    for t in TIMES:
        h = 1e-6
        central = (gaussian_flow(z, t, t + h, process) - gaussian_flow(z, t, t - h, process)) / (2 * h)
        np.testing.assert_allclose(process.velocity(z, t, mean(z, t)), central, rtol=1e-5, atol=1e-7)


def small_set():
    x = torch.rand(40, 1, 2, 3, generator=torch.Generator().manual_seed(3)) * 2 - 1
    return x, ReferenceSet(x, index=FaissIndex("Flat"))


@every_process
@pytest.mark.parametrize("estimator", [Exact(), KNN(k=40, n=20_000)], ids=["Exact", "KNN"])
def test_estimators_under_a_process_match_its_own_likelihood(process, estimator):
    """Compare with enumeration, p_t(z|x) = N(z; s·x, s²σ²·I), eq:general_forward."""
    x, reference = small_set()
    estimator.bind(reference)
    t = process.t_of_sigma(torch.tensor([0.05, 0.4, 1.0, 20.0], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 1, 2, 3, generator=generator)
    z = forward_noise(x[:4], t, noise, process)
    s, std = (v[:, None] for v in (process.scale(t), process.noise_std(t)))
    sq_dist = (z.double().flatten(1)[:, None] - s[:, None] * x.double().flatten(1)).square().sum(2)
    weights = torch.softmax(-sq_dist / (2 * std**2), dim=1)
    expected = (weights @ x.double().flatten(1)).reshape(z.shape)
    mu = under_process(estimator.posterior_mean, process)(z, t, generator=generator)
    assert mu.dtype == torch.float32
    if isinstance(estimator, KNN):
        # With k = N the n draws come from the posterior itself.
        spread = (weights @ x.double().flatten(1).square()).reshape(z.shape) - expected**2
        assert ((mu - expected).abs() <= 5 * (spread.clamp(min=0) / estimator.n).sqrt() + 1e-5).all()
    else:
        np.testing.assert_allclose(mu, expected, atol=2e-5)


@every_process
@pytest.mark.parametrize(("step", "order"), [(euler_step, 1), (heun_step, 2)])
def test_order_of_the_solver_in_each_process(process, step, order):
    t_start, t_end = process.t_of_sigma(torch.tensor([5.0, 0.1], dtype=torch.float64))
    z = process.scale(t_start) * (M + 5 * torch.randn(4, 3, dtype=torch.float64))
    exact = gaussian_flow(z, t_start, t_end, process)
    counts = np.array([64, 128, 256])
    mean = under_process(gaussian_mean, process)
    errors = []
    for count in counts:
        sigmas = torch.tensor(np.geomspace(5.0, 0.1, count + 1))
        result = z
        for t, t_next in pairwise(process.t_of_sigma(sigmas)):
            result = step(result, t, t_next, mean, process)
        errors.append((result - exact).abs().max().item())
    assert np.polyfit(np.log(1 / counts), np.log(errors), 1)[0] == pytest.approx(order, abs=0.15)


def test_a_process_without_an_inverse_gets_one_to_the_last_digits():
    class Own(VP):
        t_of_sigma = Process.t_of_sigma

    t = torch.logspace(-3, 0, 20, dtype=torch.float64)
    np.testing.assert_allclose(Own().t_of_sigma(VP().sigma(t)), t, rtol=1e-12)
