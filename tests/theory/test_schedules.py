"""The Karras grid and the schedules of iCT and ECT against numbers computed by hand and against SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import lognorm

from lit_knn.sampling.schedules import (
    PseudoHuber,
    TuningSchedule,
    consistency_weight,
    euclidean,
    ict_num_steps,
    karras_sigmas,
    lognormal_step_probs,
    pseudo_huber,
)


def test_karras_grid_at_rho_7_by_hand():
    # 0.002^(1/7) = 0.411560 and 80^(1/7) = 1.870122; the points between are at thirds, to the power 7.
    grid = karras_sigmas(4)
    assert grid.dtype == torch.float64
    assert grid[0].item() == 0.002
    assert grid[-1].item() == 80.0
    np.testing.assert_allclose(grid, [0.002, 0.469979057998, 9.723201355260, 80.0], rtol=1e-9)


@pytest.mark.parametrize("num_steps", [2, 3, 11, 1281])
@pytest.mark.parametrize("rho", [1.0, 7.0])
def test_karras_grid_ends_exactly_and_ascends(num_steps, rho):
    grid = karras_sigmas(num_steps, 0.01, 50.0, rho)
    assert grid.shape == (num_steps,)
    assert grid[0].item() == 0.01
    assert grid[-1].item() == 50.0
    assert (grid.diff() > 0).all()
    # The grid is uniform in sigma^(1/rho), so it is uniform for rho = 1.
    np.testing.assert_allclose((grid ** (1 / rho)).diff().diff(), 0, atol=1e-12 * 50)
    if rho == 1:
        np.testing.assert_allclose(grid, np.linspace(0.01, 50, num_steps))


def test_ict_doubles_its_steps_every_50_000_iterations():
    # K = 400,000, s0 = 10, s1 = 1280: K' = 400,000 / (7 + 1).
    expected = [11, 21, 41, 81, 161, 321, 641, 1281]
    for stage, num_steps in enumerate(expected):
        assert ict_num_steps(50_000 * stage) == num_steps
        assert ict_num_steps(50_000 * (stage + 1) - 1) == num_steps
    assert ict_num_steps(400_000) == 1281
    assert ict_num_steps(10**7) == 1281


def test_the_doubling_period_counts_whole_doublings_alone():
    # ⌊1000 / (log₂⌊39/10⌋ + 1)⌋ = 386
    assert [ict_num_steps(k, 1000, 10, 39) for k in (385, 386, 771, 772)] == [11, 21, 21, 40]


@pytest.mark.parametrize("num_steps", [2, 11, 1281])
@pytest.mark.parametrize("parameters", [(-1.1, 2.0), (0.5, 1.0)])
def test_step_probabilities_are_a_discretised_log_normal(num_steps, parameters):
    P_mean, P_std = parameters
    sigmas = karras_sigmas(num_steps)
    probabilities = lognormal_step_probs(sigmas, P_mean, P_std)
    assert probabilities.shape == (num_steps - 1,)
    assert probabilities.dtype == torch.float64
    assert probabilities.sum().item() == pytest.approx(1.0, rel=1e-12)
    mass = np.diff(lognorm(s=P_std, scale=math.exp(P_mean)).cdf(sigmas))
    np.testing.assert_allclose(probabilities, mass / mass.sum(), rtol=1e-8, atol=1e-14)


def test_consistency_weight_is_the_inverse_gap():
    t, t_prev = torch.tensor([80.0, 0.5]), torch.tensor([70.0, 0.25])
    np.testing.assert_allclose(consistency_weight(t, t_prev), [0.1, 4.0], rtol=1e-6)


def test_pseudo_huber_default_c_is_003_on_cifar():
    # Far from zero d(a, b) = ‖a − b‖ − c, so the test sees c.
    a = torch.full((1, 3, 32, 32), 100.0, dtype=torch.float64)
    norm = 100 * math.sqrt(3072)
    c = norm - pseudo_huber(a, torch.zeros_like(a)).item()
    assert c == pytest.approx(0.03, abs=0.0005)
    assert c == pytest.approx(0.00054 * math.sqrt(3072), rel=1e-4)


def test_pseudo_huber_limits():
    c = 0.03
    direction = torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    zero = torch.zeros_like(direction)
    small = pseudo_huber(1e-6 * direction, zero, c).item()
    assert small == pytest.approx(1e-12 / (2 * c), rel=1e-6)  # quadratic
    large = pseudo_huber(1e6 * direction, zero, c).item()
    assert large == pytest.approx(1e6, rel=1e-6)  # linear
    middle = pseudo_huber(0.04 * direction, zero, c).item()
    assert middle == pytest.approx(0.05 - 0.03, rel=1e-9)  # a 3-4-5 triangle
    assert pseudo_huber(direction, zero, 0.0).item() == pytest.approx(1.0)


def test_pseudo_huber_is_of_the_whole_vector():
    a = torch.tensor([[3.0, 4.0], [0.0, 1.0]]).reshape(2, 1, 1, 2)
    result = pseudo_huber(a, torch.zeros_like(a), 1.0)
    assert result.shape == (2,)
    np.testing.assert_allclose(result, [math.sqrt(26) - 1, math.sqrt(2) - 1], rtol=1e-6)
    per_element = math.sqrt(10) - 1 + math.sqrt(17) - 1
    assert abs(result[0].item() - per_element) > 0.5
    assert torch.equal(pseudo_huber(torch.zeros_like(a), a, 1.0), result)


def test_pseudo_huber_gradient():
    a = torch.zeros(2, 3, 4, 4)
    a[1] = 2.0
    a.requires_grad_()
    pseudo_huber(a, torch.zeros(2, 3, 4, 4)).sum().backward()
    assert a.grad[0].abs().max() == 0  # at a = b the gradient is finite and zero
    # Far away the gradient has norm 1, whatever the distance.
    assert a.grad[1].norm().item() == pytest.approx(1.0, rel=1e-4)
    a = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: pseudo_huber(a, torch.zeros(2, 5, dtype=torch.float64), 0.3), a)


# ECT's schedule, arXiv 2406.14548


@pytest.mark.parametrize(("q", "k", "b"), [(2.0, 8.0, 1.0), (7.0, 8.0, 1.0), (4.0, 0.0, 2.0), (3.0, 5.0, 0.0)])
@pytest.mark.parametrize("stage", [1, 2, 3, 8])
def test_teacher_levels_are_the_papers(q, k, b, stage):
    schedule = TuningSchedule(q, k, b, stages=8)
    levels = [1e-6, 0.002, 0.3, 1.0, 2.5, 80.0, 3000.0]
    r = schedule.teacher_level(torch.tensor(levels, dtype=torch.float64), stage)
    assert r.dtype == torch.float64
    for t, found in zip(levels, r.tolist(), strict=True):
        n = 1 + k * (1 - math.tanh(b * t / 2)) / 2  # the sigmoid of −bt by another function
        assert found == pytest.approx(max(0.0, t * (1 - n * q**-stage)), rel=1e-12, abs=0)
        assert 0 <= found < t


def test_stages_are_those_of_the_paper_until_the_last():
    schedule = TuningSchedule(steps=7, stages=3)
    # The paper counts iterations from 1: a = ⌈iteration / d⌉.
    assert [schedule.stage(step) for step in range(30)] == [min(math.ceil((step + 1) / 7), 3) for step in range(30)]


def test_the_euclidean_metric_is_the_limit_of_the_pseudo_huber_and_has_a_gradient_everywhere():
    a, b = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    expected = [math.dist(*(x.flatten().tolist() for x in pair)) for pair in zip(a, b, strict=True)]
    torch.testing.assert_close(euclidean(a, b), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(PseudoHuber(1e-9)(a, b), euclidean(a, b))
    assert torch.equal(PseudoHuber()(a, b), pseudo_huber(a, b))
    point = torch.ones(2, 3, requires_grad=True)
    euclidean(point, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 3.0]])).sum().backward()
    assert point.grad.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, -1.0]]
