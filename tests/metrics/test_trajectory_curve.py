"""Errors at latents of an estimator's own sampling, against a sampler in closed form and enumeration."""

import pytest
import torch

from lit_knn.estimators import Estimator, Exact, MonteCarlo, UniformSNIS
from lit_knn.metrics.trajectory_curve import TrajectoryCurve
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.theory.posterior import posterior_mean
from tests.toys import rng, speckles

LEVELS, NUM = [0.7, 5.0, 0.2], 12


class Constant(Estimator):
    """The same image for each z. Its probability flow is a straight line from the noise to the image."""

    deterministic = True

    def __init__(self, value):
        self.value = value

    def _posterior_mean(self, z, t, x_source, generator):
        return torch.full_like(z, self.value)


@pytest.fixture
def reference():
    return ReferenceSet(speckles(30, (1, 3, 3)))


def rows_of(estimators, reference, **options):
    settings = {"noise_levels": LEVELS, "num_z": NUM, "repeats": 20, "batch_size": 5} | options
    curve = TrajectoryCurve(estimators, **settings)
    rows = [row for level in curve.levels(reference, seed=3) for row in level]
    return {(row["estimator"], row["t"]): row for row in rows}


def enumerated_errors(value, t, reference):
    """The squared error of a constant at the points of its straight line, (NUM,), in float64."""
    noise = seeded_noise(range(NUM), reference.shape).double()
    z = value + (80.0 * noise - value) * t / 80.0
    images = reference.gather(torch.arange(reference.N)).double()
    sq_dist = (z[:, None] - images).square().flatten(2).sum(2)
    mean = (-sq_dist / (2 * t**2)).softmax(1) @ images.flatten(1)
    return (value - mean).square().mean(1)


def test_a_constant_is_measured_on_its_straight_line(reference):
    rows = rows_of({"low": Constant(-0.5), "high": Constant(0.5)}, reference)
    for (name, t), row in rows.items():
        errors = enumerated_errors(-0.5 if name == "low" else 0.5, t, reference)
        assert row["mu_mse"] == pytest.approx(errors.mean().item(), rel=1e-5)
        standard_error = errors.std().item() / NUM**0.5
        assert row["mu_mse_se"] == pytest.approx(standard_error, rel=1e-4)


def test_levels_come_from_the_highest_down_and_exact_has_no_error(reference):
    rows = rows_of({"exact": Exact()}, reference)
    assert [t for _, t in rows] == [5.0, 0.7, 0.2]
    assert all(row["mu_mse"] < 1e-9 for row in rows.values())


def test_a_level_above_the_grid_starts_the_sampler(reference):
    row = rows_of({"low": Constant(-0.5)}, reference, noise_levels=[200.0])["low", 200.0]
    noise = seeded_noise(range(NUM), reference.shape)
    t = torch.full((NUM,), 200.0, dtype=torch.float64)
    images = reference.gather(torch.arange(reference.N)).double()
    mean = posterior_mean(200.0 * noise.double(), images, t)
    assert row["mu_mse"] == pytest.approx((-0.5 - mean).square().mean().item(), rel=1e-4)


def test_sampling_that_draws_repeats_with_the_seed(reference):
    (first,) = rows_of({"drawn": MonteCarlo(n=4)}, reference, noise_levels=[5.0]).values()
    (again,) = rows_of({"drawn": MonteCarlo(n=4)}, reference, noise_levels=[5.0]).values()
    assert first["mu_mse"] == again["mu_mse"] > 0
    assert first["mu_variance"] > 0


def test_estimators_draw_apart_on_their_trajectories():
    data = ReferenceSet(torch.randn(200, 3, generator=rng(0)))
    curve = TrajectoryCurve({"a": UniformSNIS(2), "b": UniformSNIS(2)}, [1.0], 4, 2, 4)
    curve.bind(data)
    paths = curve._trajectories(data, seed=0)
    assert not torch.equal(paths["a"][0].down_to(1.0), paths["b"][0].down_to(1.0))
