"""Euler and Heun steps: their order on a closed-form flow, and the identity of eq:z_prime."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lit_knn.sampling.solvers import euler_step, heun_step

# Data distribution N(M, S² I): p_t = N(M, (S² + t²) I), so the PF-ODE keeps (z − M) / sqrt(S² + t²).
M, S = 0.7, 0.5


def gaussian_mean(z, t):
    t = t.reshape(-1, *[1] * (z.ndim - 1))
    return ((S**2 * z + t**2 * M) / (S**2 + t**2)).to(z.dtype)


def gaussian_flow(z, t, t_next):
    return M + (z - M) * np.sqrt((S**2 + t_next**2) / (S**2 + t**2))


def latents(shape=(4, 1, 2, 2), t=5.0, dtype=torch.float64, seed=0):
    return M + t * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def integrate(step, z, times):
    for t, t_next in pairwise(times):
        z = step(z, float(t), float(t_next), gaussian_mean)
    return z


class CountedMean:
    def __init__(self, mean=gaussian_mean):
        self.mean, self.calls = mean, []

    def __call__(self, z, t):
        self.calls.append((z, t))
        return self.mean(z, t)


@pytest.mark.parametrize(("step", "order"), [(euler_step, 1), (heun_step, 2)])
def test_order_of_the_solver(step, order):
    z = latents()
    exact = gaussian_flow(z, 5.0, 0.1)
    counts = np.array([64, 128, 256, 512, 1024])
    errors = []
    for count in counts:
        # The grid is uniform in log t, so that all local steps shrink together.
        result = integrate(step, z, np.geomspace(5.0, 0.1, count + 1))
        assert result.dtype == torch.float64
        errors.append((result - exact).abs().max().item())
    slope = np.polyfit(np.log(1 / counts), np.log(errors), 1)[0]
    assert slope == pytest.approx(order, abs=0.06)
    assert errors[-1] < 1e-2 if order == 1 else errors[-1] < 1e-5


def test_float64_state_is_kept_where_float32_would_stall():
    # A step of 1e-6 of t = 80 is lost in the rounding of float32 latents.
    z = latents(t=80.0)
    for step in (euler_step, heun_step):
        moved = step(z, 80.0, 80.0 - 1e-6, gaussian_mean) - z
        np.testing.assert_allclose(moved, gaussian_flow(z, 80.0, 80.0 - 1e-6) - z, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize(("t", "t_next"), [(80.0, 79.0), (80.0, 0.002), (5.0, 3.0), (0.01, 0.002), (1.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_euler_with_the_one_sample_mean_lands_on_the_same_noise(t, t_next, dtype):
    """Check eq:z_prime, z' = x + t_next·ε: consistency matching becomes consistency training."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(8, 3, 8, 8, dtype=dtype, generator=generator) - 1
    noise = torch.randn(x.shape, dtype=dtype, generator=generator)
    z = x + t * noise
    result = euler_step(z, t, t_next, lambda z, t: x)
    # The step is in float64. z's rounding shrinks with t_next / t; only the result's rounding stays.
    eps = torch.finfo(dtype).eps
    bound = eps * (z.abs().max() * t_next / t + 1 + t_next * noise.abs().max()) + 4e-16 * z.abs().max()
    assert (result - (x + t_next * noise)).abs().max() <= bound


def test_the_noise_level_zero_ends_on_the_mean():
    # The Euler step to t = 0 is the posterior mean itself.
    z = latents()
    for step in (euler_step, heun_step):
        np.testing.assert_allclose(step(z, 5.0, 0.0, gaussian_mean), gaussian_mean(z, torch.full((4,), 5.0)), rtol=1e-9)


def test_heun_makes_no_second_evaluation_at_zero():
    mean = CountedMean()
    heun_step(latents(), torch.tensor([5.0, 4.0, 3.0, 2.0]), 0.0, mean)
    assert len(mean.calls) == 1
    heun_step(latents(), 5.0, torch.zeros(4), mean)
    assert len(mean.calls) == 2


@pytest.mark.parametrize("step", [euler_step, heun_step])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixed_batch_equals_separate_calls(step, dtype):
    z = latents(dtype=torch.float64).to(dtype)
    t = torch.tensor([80.0, 5.0, 1.0, 0.002], dtype=torch.float64)
    t_next = torch.tensor([40.0, 0.0, 0.5, 0.0], dtype=torch.float64)

    def strict_mean(z, t):
        assert (t > 0).all()  # an estimator refuses t = 0
        return gaussian_mean(z, t)

    together = step(z, t, t_next, strict_mean)
    assert together.isfinite().all()
    for b in range(4):
        alone = step(z[b : b + 1], t[b].item(), t_next[b].item(), strict_mean)
        torch.testing.assert_close(together[b : b + 1], alone, rtol=0, atol=0)
