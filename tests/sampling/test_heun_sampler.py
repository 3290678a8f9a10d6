"""EDM's sampler against closed-form flows and marginals, in every process; seeds, evaluations, bad options."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.sampling.samplers import Churn, heun_sampler, seeded_noise
from lit_knn.sampling.schedules import NoiseGrid, karras_sigmas
from lit_knn.theory.noise import EDM, VP, LinearInterpolant
from tests.gaussian_flow import M, S, gaussian_mean, gaussian_sample, latents, slope

every_process = pytest.mark.parametrize("process", [EDM(), VP(), LinearInterpolant()], ids=lambda p: type(p).__name__)


class Recorded:
    def __init__(self, mean=gaussian_mean):
        self.mean, self.calls = mean, []

    def __call__(self, y, sigma):
        self.calls.append((y, sigma))
        return self.mean(y, sigma)

    @property
    def sigmas(self):
        return [sigma[0].item() for _, sigma in self.calls]


@every_process
def test_order_two_on_a_gaussian(process):
    noise = latents(6, 3)
    exact = gaussian_sample(noise)
    counts = [128, 256, 512]
    errors = [(heun_sampler(gaussian_mean, noise, n, process=process) - exact).abs().max().item() for n in counts]
    assert slope(counts, errors) == pytest.approx(2, abs=0.1)
    assert errors[-1] < 1e-3


@every_process
def test_added_noise_keeps_the_marginal(process):
    n = 100_000
    seeds = range(4)
    noise = seeded_noise(seeds, (n // 4,))
    options = {"num_steps": 128, "process": process, "seeds": seeds}
    x = heun_sampler(gaussian_mean, noise, churn=Churn(S_churn=30.0), **options).double()
    # The prior N(0, 80²) ignores the mean M, hence an offset of M·S/80. 128 Heun steps leave a variance error of 1 %.
    assert x.mean().item() == pytest.approx(M, abs=M * S / 80 + 5 * S / math.sqrt(n))
    assert x.var().item() == pytest.approx(S**2, rel=5 * math.sqrt(2 / n) + 0.01)
    # The sampler's noise makes the samples almost independent of their latents. More noise increases their variance.
    assert abs(np.corrcoef(x.flatten(), noise.flatten())[0, 1]) < 0.5
    inflated = heun_sampler(gaussian_mean, noise, churn=Churn(S_churn=30.0, S_noise=1.1), **options).double()
    assert inflated.var().item() > 1.05 * S**2


@pytest.mark.parametrize("num_steps", [1, 2, 5, 18])
@pytest.mark.parametrize("S_churn", [0.0, 10.0])
@every_process
def test_evaluations(num_steps, S_churn, process):
    denoiser = Recorded()
    heun_sampler(denoiser, latents(2, 3), num_steps, churn=Churn(S_churn=S_churn), seeds=[0, 1], process=process)
    assert len(denoiser.calls) == 2 * num_steps - 1
    assert all(y.shape == (2, 3) and sigma.shape == (2,) for y, sigma in denoiser.calls)
    # A Heun step evaluates at its own (raised) level and at the next level; the last step has one evaluation.
    grid = [80.0] if num_steps == 1 else karras_sigmas(num_steps).flip(0).tolist()
    raised = 1 + min(S_churn / num_steps, math.sqrt(2) - 1)
    expected = [level for sigma, below in pairwise(grid) for level in (raised * sigma, below)]
    np.testing.assert_allclose(denoiser.sigmas, [*expected, raised * grid[-1]], rtol=1e-9)


def test_noise_is_added_between_s_min_and_s_max():
    denoiser = Recorded()
    heun_sampler(denoiser, latents(1, 3), 6, churn=Churn(S_churn=0.6, S_min=0.05, S_max=30.0), seeds=[0])
    grid = karras_sigmas(6).flip(0).numpy()
    factor = np.where((grid >= 0.05) & (grid <= 30), 1.1, 1.0)
    assert 0 < (factor > 1).sum() < 6
    np.testing.assert_allclose(denoiser.sigmas[::2], grid * factor, rtol=1e-12)
    # The range includes its ends.
    denoiser = Recorded()
    heun_sampler(denoiser, latents(1, 3), 6, churn=Churn(S_churn=0.6, S_min=0.002, S_max=0.002), seeds=[0])
    np.testing.assert_allclose(denoiser.sigmas[::2], grid * [1, 1, 1, 1, 1, 1.1], rtol=1e-12)


def test_the_amount_of_added_noise():
    """The first evaluation shows y moved by S_noise·sqrt(σ̂² − σ²)·ε, from 80 to 1.1·80."""
    denoiser = Recorded()
    noise = latents(2, 50)
    heun_sampler(denoiser, noise, 4, churn=Churn(S_churn=0.4, S_noise=1.5), seeds=[3, 4])
    added = (denoiser.calls[0][0] - 80 * noise) / (1.5 * 80 * math.sqrt(1.1**2 - 1))
    np.testing.assert_allclose(added, seeded_noise([3, 4], (50,), draw=1), rtol=1e-9)


@every_process
@pytest.mark.parametrize("S_churn", [0.0, 10.0])
def test_an_image_depends_on_its_seed_and_not_on_its_batch(process, S_churn):
    def sample(seeds):
        noise = seeded_noise(seeds, (1, 2, 2))
        return heun_sampler(gaussian_mean, noise, 8, churn=Churn(S_churn=S_churn), seeds=seeds, process=process)

    together = sample([7, 3, 9, 7])
    assert torch.equal(together[0], together[3])
    assert not torch.equal(together[0], together[1])
    torch.manual_seed(5)
    for i, seed in enumerate((7, 3, 9, 7)):
        assert torch.equal(sample([seed])[0], together[i])
    assert torch.equal(sample(torch.tensor([9, 3])), together[[2, 1]])


def test_steps_draw_their_own_noise():
    denoiser = Recorded(lambda y, sigma: torch.zeros_like(y))
    heun_sampler(denoiser, torch.zeros(1, 5_000, dtype=torch.float64), 3, churn=Churn(S_churn=9.0), seeds=[0])
    # With a mean of 0, each step keeps y / σ, so the only new part at a step is its own noise.
    first, second, third = (y / sigma[:, None] for y, sigma in denoiser.calls[::2])
    fresh = torch.cat([first, second - first / math.sqrt(2), third - second / math.sqrt(2)])
    assert (torch.corrcoef(fresh).fill_diagonal_(0).abs() < 5 / math.sqrt(5_000)).all()
    np.testing.assert_allclose(fresh.std(1), math.sqrt(0.5), rtol=0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_is_float64_whatever_the_denoiser_sees(dtype):
    denoiser = Recorded()
    noise = latents(4, 3).to(dtype)
    x = heun_sampler(denoiser, noise, 300)
    assert x.dtype == dtype
    assert all(y.dtype == dtype and sigma.dtype == torch.float64 for y, sigma in denoiser.calls)
    # A float32 state would collect 600 roundings; in float64 none of them stays.
    reference = heun_sampler(gaussian_mean, noise.double(), 300)
    assert (x - reference).abs().max() < (1e-6 if dtype == torch.float32 else 1e-15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": -1}, "num_steps"),
        ({"num_steps": 2.5}, "num_steps"),
        ({"num_steps": True}, "num_steps"),
        ({"sigma_min": 80.0}, "sigma_min"),
        ({"sigma_min": 90.0, "num_steps": 1}, "sigma_min"),
        ({"sigma_min": 0.0}, "sigma_min"),
        ({"sigma_max": math.inf}, "sigma_max"),
        ({"sigma_max": math.nan}, "sigma_max"),
        ({"rho": 0.0}, "rho"),
        ({"S_churn": -1.0}, "S_churn"),
        ({"S_churn": math.nan}, "S_churn"),
        ({"S_min": 1.0, "S_max": 0.5}, "S_min"),
        ({"S_min": -1.0}, "S_min"),
        ({"S_noise": -0.1}, "S_noise"),
        ({"S_noise": math.inf}, "S_noise"),
        ({"S_churn": 1.0}, "seed"),
        ({"S_churn": 1.0, "seeds": [1]}, "seed"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_any_evaluation(options, message):
    denoiser = Recorded()

    def sample():
        grid = NoiseGrid(**{name: options[name] for name in ("sigma_min", "sigma_max", "rho") if name in options})
        churn = Churn(**{name: value for name, value in options.items() if name.startswith("S_")})
        others = {name: options[name] for name in ("num_steps", "seeds") if name in options}
        return heun_sampler(denoiser, latents(2, 3), grid=grid, churn=churn, **others)

    with pytest.raises(InputError, match=message) as error:
        sample()
    assert "\n" not in str(error.value)
    assert not denoiser.calls
