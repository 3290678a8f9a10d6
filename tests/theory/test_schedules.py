"""The Karras grid and the schedules of iCT and ECT against numbers computed by hand and against SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import lognorm

from lit_knn.sampling.distances import PseudoHuber, euclidean
from lit_knn.sampling.noise_grid import karras_sigmas
from lit_knn.sampling.schedules import (
    TuningSchedule,
    consistency_weight,
    ict_num_steps,
    lognormal_step_probs,
)


def test_karras_grid_ends_exactly_and_is_uniform_in_its_power():
    # 0.002^(1/7) = 0.411560 and 80^(1/7) = 1.870122; the points between are at thirds, to the power 7.
    grid = karras_sigmas(4)
    assert grid.dtype == torch.float64
    np.testing.assert_allclose(grid, [0.002, 0.469979057998, 9.723201355260, 80.0], rtol=1e-9)
    for num_steps in (2, 11, 1281):
        for rho in (1.0, 7.0):
            grid = karras_sigmas(num_steps, 0.01, 50.0, rho)
            assert (len(grid), grid[0].item(), grid[-1].item()) == (num_steps, 0.01, 50.0)
            assert (grid.diff() > 0).all()
            np.testing.assert_allclose((grid ** (1 / rho)).diff().diff(), 0, atol=1e-12 * 50)


def test_ict_doubles_its_steps_every_50_000_iterations():
    # K = 400,000, s0 = 10, s1 = 1280: K' = 400,000 / (7 + 1).
    for stage, num_steps in enumerate([11, 21, 41, 81, 161, 321, 641, 1281]):
        assert ict_num_steps(50_000 * stage) == ict_num_steps(50_000 * (stage + 1) - 1) == num_steps
    assert ict_num_steps(400_000) == ict_num_steps(10**7) == 1281
    # Only whole doublings count: ⌊1000 / (log₂⌊39/10⌋ + 1)⌋ = 386.
    assert [ict_num_steps(k, 1000, 10, 39) for k in (385, 386, 771, 772)] == [11, 21, 21, 40]


@pytest.mark.parametrize("num_steps", [2, 1281])
@pytest.mark.parametrize(("P_mean", "P_std"), [(-1.1, 2.0), (0.5, 1.0)])
def test_step_probabilities_are_a_discretised_log_normal(num_steps, P_mean, P_std):
    sigmas = karras_sigmas(num_steps)
    mass = np.diff(lognorm(s=P_std, scale=math.exp(P_mean)).cdf(sigmas))
    probabilities = lognormal_step_probs(sigmas, P_mean, P_std)
    np.testing.assert_allclose(probabilities, mass / mass.sum(), rtol=1e-8, atol=1e-14)


def test_consistency_weight_is_the_inverse_gap():
    t, t_prev = torch.tensor([80.0, 0.5]), torch.tensor([70.0, 0.25])
    np.testing.assert_allclose(consistency_weight(t, t_prev), [0.1, 4.0], rtol=1e-6)


def test_pseudo_huber_is_of_the_whole_vector_and_has_its_limits():
    a = torch.tensor([[3.0, 4.0], [0.0, 1.0]]).reshape(2, 1, 1, 2)
    expected = [math.sqrt(26) - 1, math.sqrt(2) - 1]
    np.testing.assert_allclose(PseudoHuber(1.0)(a, torch.zeros_like(a)), expected, rtol=1e-6)
    np.testing.assert_allclose(PseudoHuber(1.0)(torch.zeros_like(a), a), expected, rtol=1e-6)
    c, direction = 0.03, torch.randn(1, 3, 8, 8, dtype=torch.float64)
    direction, zero = direction / direction.norm(), torch.zeros_like(direction)
    # Quadratic for small distances, linear for large ones, and a 3-4-5 triangle.
    for length, value in ((1e-6, 1e-12 / (2 * c)), (1e6, 1e6 - c), (0.04, 0.05 - 0.03)):
        assert PseudoHuber(c)(length * direction, zero).item() == pytest.approx(value, rel=1e-6)
    # The default is c = 0.00054·√d, 0.03 on CIFAR-10. Far from zero d(a, b) = ‖a − b‖ − c.
    a = torch.full((1, 3, 32, 32), 100.0, dtype=torch.float64)
    c = 100 * math.sqrt(3072) - PseudoHuber()(a, torch.zeros_like(a)).item()
    assert c == pytest.approx(0.03, abs=0.0005)
    assert c == pytest.approx(0.00054 * math.sqrt(3072), rel=1e-4)
    a = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: PseudoHuber(0.3)(a, torch.zeros_like(a)), a)


def test_euclidean_metric_is_the_limit_of_pseudo_huber():
    a, b = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    expected = [math.dist(*(x.flatten().tolist() for x in pair)) for pair in zip(a, b, strict=True)]
    torch.testing.assert_close(euclidean(a, b), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(PseudoHuber(1e-9)(a, b), euclidean(a, b))
    for metric in (euclidean, PseudoHuber()):
        point = torch.ones(2, 3, requires_grad=True)
        metric(point, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 3.0]])).sum().backward()
        # Far away the gradient has norm 1, whatever the distance.
        torch.testing.assert_close(point.grad, torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -1.0]]))


# ECT's schedule, arXiv 2406.14548


@pytest.mark.parametrize(
    ("q", "k", "b"), [(2.0, 8.0, 1.0), (7.0, 8.0, 1.0), (4.0, 0.0, 2.0), (3.0, 5.0, 0.0)]
)
@pytest.mark.parametrize("stage", [1, 3, 8])
def test_teacher_levels_are_the_papers(q, k, b, stage):
    levels = [1e-6, 0.002, 0.3, 1.0, 2.5, 80.0, 3000.0]
    r = TuningSchedule(q, k, b, stages=8).teacher_level(
        torch.tensor(levels, dtype=torch.float64), stage
    )
    for t, found in zip(levels, r.tolist(), strict=True):
        n = 1 + k * (1 - math.tanh(b * t / 2)) / 2  # the sigmoid of −bt by another function
        assert found == pytest.approx(max(0.0, t * (1 - n * q**-stage)), rel=1e-12, abs=0)


def test_stages_are_those_of_the_paper_until_the_last():
    # The paper counts iterations from 1: a = ⌈iteration / d⌉.
    stages = [TuningSchedule(steps=7, stages=3).stage(step) for step in range(30)]
    assert stages == [min(math.ceil((step + 1) / 7), 3) for step in range(30)]
