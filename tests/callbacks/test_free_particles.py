"""Free particles reach the data, and the table and the picture say how."""

import numpy as np
import pytest
import torch
from PIL import Image

from lit_knn.callbacks import FreeParticles
from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.estimators import Exact, OneSample
from lit_knn.reference import ReferenceSet
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
