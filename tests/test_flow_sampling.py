"""Samplers of flows: their order, the adaptive steps, and the same samples as EDM's sampler."""

import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.estimators import ExactFloat64
from lit_knn.flow_sampling import AdaptiveSteps, FixedSteps
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import heun_sampler, seeded_noise
from lit_knn.schedules import NoiseGrid
from lit_knn.solvers import euler_step, heun_step
from lit_knn.theory.noise import LINEAR_PROCESS, pf_ode_velocity, under_process
from lit_knn.training.time_distributions import UniformTimes
from tests.flows import gaussian_image, gaussian_velocity
from tests.gaussian_flow import slope

TIMES = UniformTimes()
SHAPE = (1, 2, 2)


def start(velocity):
    """Noise in float64, so that the error of the solver is seen, and a velocity that knows no classes."""
    return lambda seeds: (seeded_noise(seeds, SHAPE).double(), velocity)


@pytest.mark.parametrize(("solver", "order"), [(euler_step, 1), (heun_step, 2)])
def test_order_of_convergence(solver, order):
    exact = gaussian_image(seeded_noise(range(8), SHAPE), TIMES)
    counts = [64, 128, 256, 512]
    errors = [
        (FixedSteps(solver)(start(gaussian_velocity), range(8), TIMES, count) - exact).abs().max().item()
        for count in counts
    ]
    assert slope(counts, errors) == pytest.approx(order, abs=0.1)
    assert errors[-1] < (1e-2 if order == 1 else 2e-5)


def test_the_adaptive_steps_keep_their_tolerance():
    exact = gaussian_image(seeded_noise(range(40), SHAPE), TIMES)
    errors, calls = [], []
    for tolerance in (1e-4, 1e-6, 1e-8):
        evaluated = []
        velocity = lambda z, tau, seen=evaluated: seen.append(tau) or gaussian_velocity(z, tau)  # noqa: E731
        result = AdaptiveSteps(tolerance, tolerance)(start(velocity), range(40), TIMES, None)
        errors.append((result - exact).abs().max().item())
        calls.append(len(evaluated))
        seen = torch.cat(evaluated)
        assert seen.max() <= TIMES.high
        assert seen.min() >= TIMES.low * (1 - 1e-9)
    assert errors[0] < 3e-2
    assert errors[1] < 1e-4
    assert errors[2] < 1e-6
    assert calls == sorted(calls)
    assert calls[-1] < 400


@pytest.mark.parametrize("sampler", [FixedSteps(), AdaptiveSteps(1e-4, 1e-4, pilot=4)])
def test_an_image_depends_on_its_seed_alone(sampler):
    def rough(z, tau):  # The steps that it needs differ between images.
        return torch.sin(40 * z.mean((1, 2, 3), keepdim=True) * z) + z

    steps = None if sampler.chooses_steps else 5
    together = sampler(start(rough), [7, 8, 9, 10], TIMES, steps)
    for seed, image in zip([7, 8, 9, 10], together, strict=True):
        torch.testing.assert_close(sampler(start(rough), [seed], TIMES, steps)[0], image, rtol=1e-9, atol=1e-9)


def test_the_times_of_a_sampler_are_equal_steps_above_the_lowest():
    times = UniformTimes(0.05, 0.95)
    torch.testing.assert_close(times.descending(2), torch.tensor([0.95, 0.475]).double())
    assert times.descending(100).min() >= 0.05
    assert len(times.descending(100)) == 95  # The steps are 0.0095 long, so five times are below 0.05.
    assert times.descending(1).tolist() == [0.95]
    for count in (0, True, 2.0):
        with pytest.raises(InputError, match="num_steps must be an integer of at least 1"):
            times.descending(count)


def test_flow_and_edm_draw_the_same_images_from_the_same_noise():
    # The change of variables y = z/(1 − τ), σ = τ/(1 − τ) turns one ODE into the other, start and end included.
    reference = ReferenceSet(torch.randn(20, *SHAPE, generator=torch.Generator().manual_seed(0)) * 0.6)
    exact = ExactFloat64().bind(reference).posterior_mean
    mean = under_process(lambda y, sigma: exact(y, sigma).double(), LINEAR_PROCESS)

    def velocity(z, tau):
        return pf_ode_velocity(z, tau, mean(z, tau), LINEAR_PROCESS)

    times, seeds = UniformTimes(0.002, 0.99), range(16)
    noise = seeded_noise(seeds, SHAPE).double()
    grid = NoiseGrid(*(end / (1 - end) for end in (times.low, times.high)))
    edm = heun_sampler(lambda y, sigma: exact(y, sigma), noise, 300, grid)
    adaptive = AdaptiveSteps(1e-7, 1e-7)(start(velocity), seeds, times, None)
    torch.testing.assert_close(adaptive, edm, rtol=0, atol=1e-4)
    fixed = FixedSteps()(start(velocity), seeds, times, 300)
    torch.testing.assert_close(fixed, adaptive, rtol=0, atol=2e-3)


@pytest.mark.parametrize("velocity", [lambda z, tau: z * torch.nan, lambda z, tau: z * 1e3 * torch.sin(1e6 * tau[0])])
def test_a_flow_that_cannot_be_integrated_is_told_in_one_line(velocity):
    with pytest.raises(InputError, match=r"^AdaptiveSteps: the flow cannot be integrated: .*$"):
        AdaptiveSteps(1e-9, 1e-9)(start(velocity), [1], TIMES, None)


@pytest.mark.parametrize("option", ["rtol", "atol", "pilot"])
def test_bad_tolerances_are_refused(option):
    with pytest.raises(InputError, match=f"AdaptiveSteps: {option} must be above 0, got 0"):
        AdaptiveSteps(**{option: 0})
