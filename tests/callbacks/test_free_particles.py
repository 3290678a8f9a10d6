"""Free particles reach the data, and the table and the picture say how."""

from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from lit_knn.callbacks import FreeParticles
from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.estimators import Estimator, Exact, OneSample, UniformSNIS
from lit_knn.metrics.particles import Particles
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.noise_grid import NoiseGrid
from tests.trained_runs import events_of

EXACT = {"Exact": {"class_path": "Exact"}}


def test_particles_reach_the_digits_and_copy_at_small_levels(validate):
    options = {"estimators": EXACT, "t_min": [0.3, 1.5], "steps": 25, "every_n_steps": 15}
    options |= {"num_particles": 600, "step_size": 0.9}
    folder = validate({"FreeParticles": options}, "--data.held_out", "300")
    rows = read_rows(folder / "particles.csv")
    assert [(row["run"], row["step"]) for row in rows] == [
        (run, step) for run in ("Exact, t ≥ 0.3", "Exact, t ≥ 1.5") for step in ("0", "15", "25")
    ]
    start, _, copies, _, _, new = rows
    assert float(start["fd_pixels"]) > 50
    assert float(copies["fd_pixels"]) < 0.1
    assert float(copies["copied_fraction"]) > 0.3
    assert float(new["copied_fraction"]) < 0.02
    # Held-out images are further away than those of the set.
    assert float(copies["fd_pixels_held_out"]) > 3 * float(copies["fd_pixels"])
    assert np.asarray(Image.open(folder / "particles.png").convert("L")).std() > 5
    events, _ = events_of(folder)
    assert events.Tags()["images"] == ["particles"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimators": {"one": OneSample()}}, r"estimators\.one: OneSample uses the image"),
        ({"t_min": []}, "t_min is empty"),
        ({"t_min": [9.0]}, "need 0 < sigma_min < sigma_max"),
        ({"steps": 0}, "steps must be at least 1"),
    ],
)
def test_options_of_particles_are_checked(options, message):
    with pytest.raises(InputError, match=f"FreeParticles: {message}"):
        FreeParticles(**{"estimators": {"Exact": Exact()}, **options})


def test_one_estimator_of_data_and_particles_is_bound_apart():
    estimator = Exact()
    particles = FreeParticles({"Exact": estimator}, repulsion=estimator)
    particles.repulsion.bind(ReferenceSet(torch.zeros(3, 1)))
    estimator.bind(ReferenceSet(torch.ones(2, 1)))
    assert particles.repulsion.reference.N == 3


class Zero(Estimator):
    """Says that each mean is 0."""

    deterministic = True

    def _posterior_mean(self, z, t, x_source, generator):
        return torch.zeros_like(z)


def test_an_estimator_of_data_draws_anew_in_each_step():
    data = UniformSNIS(1).bind(ReferenceSet(torch.arange(1000.0)[:, None]))
    particles = Particles(Zero(), NoiseGrid(1.0, 2.0), num=8, step_size=1.0, seed=0)
    first, second, third = islice(particles.paths(data), 3)  # Each step adds the drawn image.
    assert not torch.allclose(second - first, third - second, atol=0.1)
