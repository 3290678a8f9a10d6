"""Properties of samplers: any number of steps, any grid, any shape, against data whose posterior mean is known."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_knn.sampling.samplers import (
    Churn,
    consistency_sampler,
    heun_sampler,
    hybrid_sampler,
    integrate_flow,
    seeded_noise,
)
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.noise import EDM, VP, LinearInterpolant

SHAPES = st.sampled_from([(1,), (5,), (2, 3), (3, 4, 4)])
PROCESSES = st.sampled_from([EDM(), VP(), LinearInterpolant()])


@st.composite
def grids(draw):
    low = 10 ** draw(st.floats(-4, 0))
    return NoiseGrid(low, low * 10 ** draw(st.floats(0.1, 4)), draw(st.floats(1, 10)))


def latents(shape, seed=0, B=2):
    return seeded_noise(range(seed, seed + B), shape)


def gaussian_mean(mean, std):
    """E[x | x + σε = z] for x ~ N(mean, std²)."""

    def posterior_mean(z, t):
        variance = t.double().reshape(-1, *[1] * (z.ndim - 1)).square()
        return (std**2 * z + variance * mean) / (std**2 + variance)

    return posterior_mean


@given(grids(), st.integers(1, 60))
def test_levels_descend_from_the_largest(grid, num_steps):
    sigmas = grid.descending(num_steps)
    assert len(sigmas) == num_steps
    assert sigmas[0] == grid.sigma_max
    assert (sigmas[1:] < sigmas[:-1]).all()
    assert num_steps == 1 or sigmas[-1] == grid.sigma_min


@given(grids(), st.integers(1, 12), SHAPES, PROCESSES, st.floats(-3, 3), st.floats(0, 40))
def test_one_image_is_the_end_of_every_path(grid, num_steps, shape, process, value, churn):
    # The posterior mean of a single image is this image, wherever z is.
    target = torch.full(shape, value)
    sample = heun_sampler(
        lambda z, t: target.expand_as(z), latents(shape), num_steps, grid, Churn(churn), [4, 5], process
    )
    torch.testing.assert_close(sample, target.expand_as(sample), atol=1e-5, rtol=1e-5)


@given(grids(), SHAPES, st.floats(-1, 1), st.floats(0.1, 2))
def test_one_step_is_the_posterior_mean_at_the_largest_noise(grid, shape, mean, std):
    z = latents(shape).double()
    known = gaussian_mean(mean, std)
    sample = heun_sampler(known, z, 1, grid)
    expected = known(grid.sigma_max * z, torch.full((2,), grid.sigma_max))
    torch.testing.assert_close(sample, expected)


@given(SHAPES, st.floats(-1, 1), st.floats(0.2, 2), PROCESSES)
def test_many_steps_follow_the_flow_of_a_gaussian(shape, mean, std, process):
    # The flow keeps (z − mean)/√(std² + σ²).
    z, grid = latents(shape).double(), NoiseGrid(0.002, 20.0)
    end = mean + (grid.sigma_max * z - mean) * std / math.hypot(std, grid.sigma_max)
    errors = [(heun_sampler(gaussian_mean(mean, std), z, n, grid, process=process) - end).abs().max() for n in (20, 80)]
    assert errors[1] < 0.02
    assert errors[1] < errors[0] / 6 + 1e-5


@given(grids(), st.integers(1, 10), SHAPES, st.floats(0.01, 0.99), st.floats(0.1, 2))
def test_a_hybrid_of_one_mean_is_the_path_through_its_levels(grid, num_steps, shape, share, std):
    t_switch = grid.sigma_min ** (1 - share) * grid.sigma_max**share
    known, z = gaussian_mean(0.3, std), latents(shape).double()
    sigmas = grid.descending(num_steps).tolist()
    levels = torch.tensor([*sorted({*sigmas, t_switch}, reverse=True), 0.0], dtype=torch.float64)
    expected = integrate_flow(known, grid.sigma_max * z, levels, torch.float64)
    torch.testing.assert_close(hybrid_sampler(known, known, z, t_switch, num_steps, grid), expected)


@given(grids(), st.integers(1, 5), SHAPES, st.floats(-2, 2))
def test_a_consistency_function_of_one_image_gives_it(grid, num_steps, shape, value):
    sigmas = grid.descending(num_steps + 1)[:-1].tolist()
    noise = torch.stack([latents(shape, 10 * i) for i in range(len(sigmas))])
    seen = []

    def function(z, t):
        seen.append((z, t))
        return torch.full_like(z, value)

    sample = consistency_sampler(function, noise, sigmas, grid.sigma_min)
    assert (sample == value).all()
    for step, (z, t) in enumerate(seen):
        # z has the noise level that is stated: the data's σ_min and the rest add up to σ².
        spread = sigmas[step] if step == 0 else math.sqrt(sigmas[step] ** 2 - grid.sigma_min**2)
        start = 0.0 if step == 0 else value
        torch.testing.assert_close(z, start + spread * noise[step], atol=1e-5, rtol=1e-5)
        assert (t == sigmas[step]).all()


@given(SHAPES, st.floats(1e-3, 50), st.floats(0, 1), st.floats(-2, 2), PROCESSES)
def test_steps_along_a_straight_path_are_exact(shape, sigma, share, value, process):
    """With one image x, z(t) = s(t)·(x + σ(t)·ε): for EDM and flow matching the path is straight in t."""
    if isinstance(process, VP):
        return
    t = process.t_of_sigma(torch.tensor(sigma, dtype=torch.float64))
    t_next, noise = share * t, latents(shape).double()
    x = torch.full_like(noise, value)
    z = process.scale(t) * x + process.noise_std(t) * noise
    expected = process.scale(t_next) * x + process.noise_std(t_next) * noise
    for step in (euler_step, heun_step):
        found = step(z, t, t_next, lambda z, t: x, process)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
