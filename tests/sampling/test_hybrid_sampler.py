"""The hybrid sampler of Figure 5: two posterior means, one on each side of t_switch."""

import math

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.samplers import hybrid_sampler, hybrid_sigmas, integrate_flow
from lit_knn.sampling.schedules import karras_sigmas
from lit_knn.theory.noise import forward_noise
from tests.gaussian_flow import gaussian_mean, latents, slope

# A second Gaussian N(A, B²) is the data above t_switch.
A, B = -0.4, 1.3


def other_mean(z, t):
    t = t.reshape(-1, *[1] * (z.ndim - 1))
    return (B**2 * z + t**2 * A) / (B**2 + t**2)


def test_order_two_when_the_means_differ():
    # The flow of a Gaussian N(m, s²) keeps (z − m)/sqrt(s² + t²), on either side of t_switch.
    noise, switch, low = latents(6, 3), 3.1, 0.002
    z = A + (80 * noise - A) * math.sqrt((B**2 + switch**2) / (B**2 + 80**2))
    z = 0.7 + (z - 0.7) * math.sqrt((0.5**2 + low**2) / (0.5**2 + switch**2))
    exact = gaussian_mean(z, torch.full((6,), low, dtype=torch.float64))
    counts = [128, 256, 512]
    errors = [(hybrid_sampler(other_mean, gaussian_mean, noise, switch, n) - exact).abs().max().item() for n in counts]
    assert slope(counts, errors) == pytest.approx(2, abs=0.15)


@pytest.mark.parametrize("t_switch", [0.5, karras_sigmas(18)[7].item(), 79.9])
def test_the_grid_is_edms_with_t_switch_in_it(t_switch):
    above, below = hybrid_sigmas(t_switch)
    assert above[0] == 80
    assert above[-1] == below[0] == t_switch
    assert below[-2:].tolist() == [0.002, 0]
    assert (above.diff() < 0).all()
    assert (below.diff() < 0).all()
    levels = set(above.tolist()) | set(below[:-1].tolist())
    assert levels == {*karras_sigmas(18).tolist(), t_switch}


def test_each_mean_is_evaluated_on_its_side_alone():
    seen = {"above": [], "below": []}

    def watched(side):
        def mean(z, t):
            assert z.dtype == torch.float32
            seen[side] += t.tolist()
            return gaussian_mean(z, t)

        return mean

    hybrid_sampler(watched("above"), watched("below"), latents(1, 3, dtype=torch.float32), 2.0)
    assert min(seen["above"]) == 2.0 == max(seen["below"])
    # EDM's sampler has 2·18 − 1 evaluations, two per step and one in the last; t_switch adds a step with two.
    assert len(seen["above"]) + len(seen["below"]) == 2 * 18 - 1 + 2


def test_forward_samples_and_the_exact_flow_agree_in_distribution():
    # Figure 5 relies on this: at t_switch, the exact flow from pure noise has the distribution of x + t·ε.
    points = torch.tensor([-0.9, 0.1, 0.8])
    reference = ReferenceSet(points.reshape(3, 1))
    exact = Exact().bind(reference).posterior_mean
    above, _ = hybrid_sigmas(0.7, 60)
    flow = integrate_flow(exact, 80 * latents(4000, 1), above)
    x = points[torch.randint(3, (4000,), generator=torch.Generator().manual_seed(2))].reshape(-1, 1)
    forward = forward_noise(x, 0.7, latents(4000, 1, seed=3).float()).double()
    levels = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)
    # Quantiles of 4,000 draws have an error of about 0.025 at this density, and more in the tails.
    torch.testing.assert_close(flow.quantile(levels), forward.quantile(levels), rtol=0, atol=0.12)


@pytest.mark.parametrize("t_switch", [0.002, 0.001, 80.0, 100.0, math.nan])
def test_t_switch_outside_the_noise_levels_is_refused(t_switch):
    with pytest.raises(InputError, match=rf"t_switch={t_switch} must be between sigma_min=0.002 and sigma_max=80"):
        hybrid_sampler(gaussian_mean, gaussian_mean, latents(2, 3), t_switch)
    with pytest.raises(InputError, match="num_steps must be"):
        hybrid_sampler(gaussian_mean, gaussian_mean, latents(2, 3), 1.0, 0)
