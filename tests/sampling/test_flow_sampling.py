"""The sampler of flows: its order, and the same samples as SciPy's integrator and EDM's sampler."""

import pytest
import torch
from scipy.integrate import solve_ivp

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact
from lit_knn.modules.time_distributions import UniformTimes
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.flow_times import FixedSteps
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.noise import LINEAR_PROCESS, per_item, under_process
from tests.flows import gaussian_image, gaussian_velocity
from tests.gaussian_flow import slope

TIMES = UniformTimes()
SHAPE = (1, 2, 2)


def noise_of(seeds):
    """Noise in float64, so that the error of the solver is seen."""
    return seeded_noise(seeds, SHAPE).double()


@pytest.mark.parametrize(("solver", "order"), [(euler_step, 1), (heun_step, 2)])
def test_order_of_convergence(solver, order):
    noise = noise_of(range(8))
    exact = gaussian_image(noise, TIMES)
    counts = [64, 128, 256, 512]
    errors = [
        (FixedSteps(solver)(gaussian_velocity, noise, TIMES, count) - exact).abs().max().item() for count in counts
    ]
    assert slope(counts, errors) == pytest.approx(order, abs=0.1)
    assert errors[-1] < (1e-2 if order == 1 else 2e-5)


def test_the_times_of_a_sampler_are_equal_steps_above_the_lowest():
    times = UniformTimes(0.05, 0.95)
    torch.testing.assert_close(times.descending(2), torch.tensor([0.95, 0.475]).double())
    assert times.descending(100).min() >= 0.05
    assert len(times.descending(100)) == 95  # The steps are 0.0095 long, so five times are below 0.05.
    assert times.descending(1).tolist() == [0.95]
    for count in (0, True, 2.0):
        with pytest.raises(InputError, match="num_steps must be an integer from 1 to"):
            times.descending(count)


def test_flow_and_edm_draw_the_same_images_from_the_same_noise():
    # The change of variables y = z/(1 − τ), σ = τ/(1 − τ) turns one ODE into the other, start and end included.
    reference = ReferenceSet(torch.randn(20, *SHAPE, generator=torch.Generator().manual_seed(0)) * 0.6)
    exact = Exact().bind(reference).posterior_mean
    mean = under_process(lambda y, sigma: exact(y, sigma).double(), LINEAR_PROCESS)

    def velocity(z, tau):
        return LINEAR_PROCESS.velocity(z, per_item(tau, z), mean(z, tau))

    def flat(tau, z):
        z = torch.tensor(z).reshape(noise.shape)
        return velocity(z, torch.full((len(z),), tau, dtype=torch.float64)).flatten().numpy()

    times, noise = UniformTimes(0.002, 0.99), noise_of(range(16))
    grid = NoiseGrid(*(end / (1 - end) for end in (times.low, times.high)))
    edm = heun_sampler(lambda y, sigma: exact(y, sigma), noise, 300, grid)
    z = solve_ivp(flat, (times.high, times.low), times.high * noise.flatten().numpy(), rtol=1e-7, atol=1e-7).y[:, -1]
    adaptive = torch.tensor(z - times.low * flat(times.low, z)).reshape(noise.shape)
    torch.testing.assert_close(adaptive, edm, rtol=0, atol=1e-4)
    fixed = FixedSteps()(velocity, noise, times, 300)
    torch.testing.assert_close(fixed, adaptive, rtol=0, atol=2e-3)
