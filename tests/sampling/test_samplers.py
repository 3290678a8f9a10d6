"""Steps and samplers against closed-form flows and marginals, in every process; seeds, evaluations, bad options."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_knn.common.errors import InputError
from lit_knn.sampling.hybrid_sampler import hybrid_sampler, hybrid_sigmas
from lit_knn.sampling.noise_grid import NoiseGrid, karras_sigmas
from lit_knn.sampling.samplers import (
    consistency_sampler,
    heun_sampler,
    integrate_flow,
    seeded_noise,
)
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.noise import EDM, VP, LinearInterpolant
from tests.gaussian_flow import M, S, gaussian_mean, gaussian_sample, latents, slope

EVERY = [EDM(), VP(), LinearInterpolant()]
every_process = pytest.mark.parametrize(
    "process", EVERY, ids=lambda process: type(process).__name__
)
SHAPES = st.sampled_from([(1,), (5,), (2, 3), (3, 4, 4)])
SHARES = st.just(0.0) | st.floats(1e-3, 1)


@st.composite
def grids(draw):
    low = 10 ** draw(st.floats(-4, 0))
    return NoiseGrid(low, low * 10 ** draw(st.floats(0.1, 4)), draw(st.floats(1, 10)))


class Recorded:
    """A posterior mean that keeps what it is called with."""

    def __init__(self, mean=gaussian_mean):
        self.mean, self.calls = mean, []

    def __call__(self, y, sigma):
        assert (sigma > 0).all()  # an estimator refuses t = 0
        self.calls.append((y, sigma))
        return self.mean(y, sigma)

    @property
    def sigmas(self):
        return [sigma[0].item() for _, sigma in self.calls]


# Steps


def gaussian_flow(z, t, t_next):
    """The PF-ODE of data N(M, S²) keeps (z − M) / sqrt(S² + t²)."""
    return M + (z - M) * np.sqrt((S**2 + t_next**2) / (S**2 + t**2))


@pytest.mark.parametrize(("step", "order"), [(euler_step, 1), (heun_step, 2)])
def test_order_of_a_step(step, order):
    start = M + 5.0 * latents(4, 1, 2, 2)
    counts, errors = np.array([64, 128, 256, 512, 1024]), []
    for count in counts:
        # The grid is uniform in log t, so that all local steps shrink together.
        z = start
        for t, t_next in pairwise(np.geomspace(5.0, 0.1, count + 1)):
            z = step(z, float(t), float(t_next), gaussian_mean)
        errors.append((z - gaussian_flow(start, 5.0, 0.1)).abs().max().item())
    assert slope(counts, errors) == pytest.approx(order, abs=0.06)
    assert errors[-1] < (1e-2 if order == 1 else 1e-5)
    # A step of 1e-6 of t = 80 is lost in the rounding of float32 latents.
    z = M + 80.0 * latents(4, 1, 2, 2)
    moved = step(z, 80.0, 80.0 - 1e-6, gaussian_mean) - z
    np.testing.assert_allclose(
        moved, gaussian_flow(z, 80.0, 80.0 - 1e-6) - z, rtol=1e-6, atol=1e-13
    )


@given(
    SHAPES,
    st.floats(1e-3, 50),
    SHARES,
    st.floats(-2, 2),
    st.sampled_from([EDM(), LinearInterpolant()]),
)
def test_steps_along_a_straight_path_are_exact(shape, sigma, share, value, process):
    """With one image x, z(t) = s(t)·(x + σ(t)·ε), eq:z_prime: for EDM and flow matching the path is straight in t."""
    t = process.t_of_sigma(torch.tensor(sigma, dtype=torch.float64))
    t_next, noise = share * t, latents(2, *shape)
    x = torch.full_like(noise, value)
    z, expected = (
        process.scale(time) * x + process.noise_std(time) * noise for time in (t, t_next)
    )
    for step in (euler_step, heun_step):
        found = step(z, t, t_next, lambda z, t: x, process)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("step", [euler_step, heun_step])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_of_mixed_levels_equals_separate_calls(step, dtype):
    z = latents(4, 1, 2, 2).to(dtype)
    t = torch.tensor([80.0, 5.0, 1.0, 0.002], dtype=torch.float64)
    t_next = torch.tensor([40.0, 0.0, 0.5, 0.0], dtype=torch.float64)
    together = step(z, t, t_next, Recorded())
    for b in range(4):
        alone = step(z[b : b + 1], t[b].item(), t_next[b].item(), Recorded())
        torch.testing.assert_close(together[b : b + 1], alone, rtol=0, atol=0)
    mean = Recorded()
    torch.testing.assert_close(step(z, t, 0.0, mean), gaussian_mean(z, t))
    assert len(mean.calls) == 1  # The velocity at 0 is not defined.


# EDM's sampler


@every_process
def test_order_two_on_a_gaussian(process):
    noise = latents(6, 3)
    exact = gaussian_sample(noise)
    counts = [128, 256, 512]
    errors = [
        (heun_sampler(gaussian_mean, noise, n, process=process) - exact).abs().max().item()
        for n in counts
    ]
    assert slope(counts, errors) == pytest.approx(2, abs=0.1)
    assert errors[-1] < 1e-3


@pytest.mark.parametrize("num_steps", [1, 2, np.int64(18)])
@every_process
def test_evaluations(num_steps, process):
    denoiser = Recorded()
    heun_sampler(denoiser, latents(2, 3), num_steps, process=process)
    assert all(y.shape == (2, 3) and sigma.shape == (2,) for y, sigma in denoiser.calls)
    # A Heun step evaluates at its own level and at the next one; the last step has one evaluation.
    grid = [80.0] if num_steps == 1 else karras_sigmas(num_steps).flip(0).tolist()
    expected = [level for pair in pairwise(grid) for level in pair]
    np.testing.assert_allclose(denoiser.sigmas, [*expected, grid[-1]], rtol=1e-9)


@every_process
def test_an_image_depends_on_its_seed_and_not_on_its_batch(process):
    def sample(seeds):
        return heun_sampler(gaussian_mean, seeded_noise(seeds, (1, 2, 2)), 8, process=process)

    together = sample([7, 3, 9, 7])
    assert torch.equal(together[0], together[3])
    assert not torch.equal(together[0], together[1])
    torch.manual_seed(5)
    for i, seed in enumerate((7, 3, 9, 7)):
        assert torch.equal(sample([seed])[0], together[i])
    assert torch.equal(sample(torch.tensor([9, 3])), together[[2, 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_is_float64_whatever_the_denoiser_sees(dtype):
    denoiser, start = Recorded(), 80 * latents(4, 3)
    z = integrate_flow(denoiser, start, torch.linspace(80, 70, 301, dtype=torch.float64), dtype)
    assert all(y.dtype == dtype and sigma.dtype == torch.float64 for y, sigma in denoiser.calls)
    # A float32 state would collect 300 roundings of 4e-6.
    assert (z - gaussian_flow(start, 80.0, 70.0)).abs().max() < 1e-6
    assert heun_sampler(gaussian_mean, latents(4, 3).to(dtype), 3).dtype == dtype


# The hybrid sampler of Figure 5. A second Gaussian N(A, B²) is the data above t_switch.
A, B = -0.4, 1.3


def other_mean(z, t):
    t = t.reshape(-1, *[1] * (z.ndim - 1))
    return (B**2 * z + t**2 * A) / (B**2 + t**2)


def test_the_hybrid_sampler_has_order_two_when_the_means_differ():
    # The flow of a Gaussian N(m, s²) keeps (z − m)/sqrt(s² + t²), on either side of t_switch.
    noise, switch = latents(6, 3), 3.1
    z = A + (80 * noise - A) * math.sqrt((B**2 + switch**2) / (B**2 + 80**2))
    exact = gaussian_mean(
        gaussian_flow(z, switch, 0.002), torch.full((6,), 0.002, dtype=torch.float64)
    )
    counts = [128, 256, 512]
    errors = [
        (hybrid_sampler(other_mean, gaussian_mean, noise, switch, n) - exact).abs().max().item()
        for n in counts
    ]
    assert slope(counts, errors) == pytest.approx(2, abs=0.15)


@pytest.mark.parametrize("t_switch", [0.5, karras_sigmas(18)[7].item(), 79.9])
def test_hybrid_sampler_evaluates_each_mean_on_its_side(t_switch):
    above, below = hybrid_sigmas(t_switch)
    assert above[-1] == below[0] == t_switch
    assert below[-2:].tolist() == [0.002, 0]
    assert (above.diff() < 0).all()
    assert (below.diff() < 0).all()
    levels = {*above.tolist(), *below[:-1].tolist()}
    assert levels == {*karras_sigmas(18).tolist(), t_switch}
    first, second = Recorded(), Recorded()
    hybrid_sampler(first, second, latents(1, 3, dtype=torch.float32), t_switch)
    assert min(first.sigmas) == t_switch == max(second.sigmas)
    assert all(y.dtype == torch.float32 for y, _ in first.calls + second.calls)
    # Two evaluations a step, and one in the last
    assert len(first.calls) + len(second.calls) == 2 * len(levels) - 1


# The consistency sampler


@given(grids(), st.integers(1, 5), SHAPES, st.floats(-2, 2))
def test_a_consistency_function_of_one_image_gives_it(grid, num_steps, shape, value):
    sigmas = grid.descending(num_steps + 1)[:-1].tolist()
    noise = torch.stack([seeded_noise([0, 1], shape, draw) for draw in range(len(sigmas))])
    seen = []

    def function(z, t):
        seen.append((z, t))
        return torch.full_like(z, value)

    assert (consistency_sampler(function, noise, sigmas, grid.sigma_min) == value).all()
    for step, (z, t) in enumerate(seen):
        # z has the noise level that is stated: the data's σ_min and the rest add up to σ².
        spread = sigmas[step] if step == 0 else math.sqrt(sigmas[step] ** 2 - grid.sigma_min**2)
        start = 0.0 if step == 0 else value
        torch.testing.assert_close(z, start + spread * noise[step], atol=1e-5, rtol=1e-5)
        assert (t == sigmas[step]).all()


# Seeds


def test_seeded_noise_depends_on_the_seed_and_the_draw_alone():
    noise = seeded_noise([5, 3, 5, 9], (3, 4, 4))
    assert (noise.shape, noise.dtype) == ((4, 3, 4, 4), torch.float32)
    assert torch.equal(noise[0], noise[2])
    torch.manual_seed(99)  # the default generator must not matter
    before = torch.get_rng_state()
    for i, seed in enumerate((5, 3, 5, 9)):
        assert torch.equal(seeded_noise([seed], (3, 4, 4))[0], noise[i])
    assert torch.equal(seeded_noise(torch.tensor([3, 9]), (3, 4, 4)), noise[[1, 3]])
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (seeded_noise(range(200), (64,), draw=draw) for draw in (0, 1))
    # Neither are neighbouring seeds or draws alike, nor draw 1 of a seed and draw 0 of the next one.
    for one, other in ((first, second), (first[1:], first[:-1]), (first[1:], second[:-1])):
        assert abs(np.corrcoef(one.flatten(), other.flatten())[0, 1]) < 5 / math.sqrt(one.numel())
    np.testing.assert_allclose([first.mean(), first.std()], [0, 1], atol=0.05)


# What is refused


def sampled(num_steps=18, **levels):
    return heun_sampler(Recorded(), latents(2, 3), num_steps, NoiseGrid(**levels))


REFUSED = [
    (sampled, {"num_steps": 0}, "num_steps must be at least 1, got 0"),
    *(
        (sampled, {"sigma_min": level, "num_steps": 1}, "need 0 < sigma_min < sigma_max")
        for level in (0.0, 80.0)
    ),
    *(
        (sampled, {"sigma_max": level}, "need 0 < sigma_min < sigma_max")
        for level in (math.inf, math.nan)
    ),
    *((hybrid_sigmas, {"t_switch": level}, "t_switch=") for level in (0.002, 80.0, math.nan)),
    *(
        (seeded_noise, {"seeds": seeds, "shape": (2,)}, "seeds must")
        for seeds in ([-1], [1.9], [], 3)
    ),
    (karras_sigmas, {"num_steps": 2.5}, "num_steps must be a whole number, got 2.5"),
]


@pytest.mark.parametrize(("call", "options", "message"), REFUSED)
def test_bad_options_are_refused(call, options, message):
    with pytest.raises(InputError, match=message):
        call(**options)


@pytest.mark.parametrize(
    "sigmas", [(), (1.0, 80.0), (math.inf, 1.0), (80.0, math.nan), (80.0, 80.0), (80.0, 0.002)]
)
def test_levels_that_do_not_descend_to_the_end_are_refused(sigmas):
    with pytest.raises(
        InputError, match=r"sampling_sigmas=.* must descend and stay above sigma_min=0\.002"
    ):
        consistency_sampler(lambda z, t: z, torch.zeros(len(sigmas), 1, 3), sigmas)


@pytest.mark.parametrize("shape", [(4, 1, 6, 6), (1, 3)])
def test_noise_without_the_axis_of_steps_is_refused(shape):
    with pytest.raises(InputError, match=r"noise must be \(1, B, \*shape\), a draw each step"):
        consistency_sampler(lambda z, t: z, torch.zeros(shape))
