"""The loss and the error of runs by noise level: a network that is nothing has those of its skip connection."""

import math

import numpy as np
import pytest
import torch

from benchmarks.learning_curves import levels
from benchmarks.learning_curves.kinds import KINDS
from benchmarks.learning_curves.sets import HELD_OUT, cifar
from benchmarks.learning_curves.table import CurveTable
from lit_knn.estimators import OneSample

NUMBER = 200


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder with two runs, whose weights are 0. That of `Exact` is an earlier one, with a last checkpoint alone."""
    monkeypatch.setattr(levels, "LATENTS", NUMBER)
    pixels = np.random.default_rng(0).integers(0, 256, (HELD_OUT + 1_000, 3, 16, 16), np.uint8)
    np.savez(tmp_path / "kept.npz", images=pixels, labels=np.zeros(len(pixels), np.int64))
    image_set = cifar("cifar16_1000", None, tmp_path / "kept.npz")
    module = KINDS["EDM"].make(image_set.net(), {"estimator": OneSample()}, 0, 1, None)
    weights = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    for folder, files in (("isotropic 6-3-abc", ("step=10", "last")), ("Exact-0-abc", ("last",))):
        (tmp_path / f"cifar16_1000-EDM-{folder}").mkdir()
        for name in files:
            path = tmp_path / f"cifar16_1000-EDM-{folder}" / f"{name}.ckpt"
            torch.save({"state_dict": weights, "global_step": 10}, path)
    return tmp_path, image_set


def measure(folder, *options):
    arguments = ["--set", "cifar16_1000", "--kept", str(folder / "kept.npz"), *options]
    levels.main([*arguments, "--checkpoints", str(folder), "--output", str(folder / "rows.csv")])
    return CurveTable(folder / "rows.csv").runs()


def test_the_loss_of_each_range_is_that_of_its_latents(runs):
    folder, image_set = runs
    rows = measure(folder)
    assert {(run.estimator, run.seed) for run in rows} == {("isotropic 6", 3), ("Exact", 0)}
    x, z, t, _, _ = KINDS["EDM"].latents(image_set.images().held_out, NUMBER, levels.NEW)
    # EDM's preconditioning and weight (2206.00364, table 1) of a network whose output is 0.
    x, z, t = (part.double().numpy() for part in (x, z, t))
    per_item = t[:, None, None, None]
    denoised = 0.25 / (per_item**2 + 0.25) * z
    losses = (t**2 + 0.25) / (0.5 * t) ** 2 * ((denoised - x) ** 2).mean((1, 2, 3))
    for low, high in ((0.1, 0.3), (0.3, 1.0), (1.0, 3.0)):
        (row,) = next(own for run, own in rows.items() if run.set.endswith(f"{low:g} to {high:g}"))
        assert row["step"] == 10
        expected = losses[(t >= low) & (t < high)].mean()
        assert row["held_out_loss"] == pytest.approx(expected, rel=1e-5)
        assert math.isfinite(row["val_error"])


def test_measured_checkpoints_are_kept_and_no_run_is_an_error(runs, capsys, monkeypatch):
    folder, _ = runs
    assert {run.seed for run in measure(folder, "--seeds", "3")} == {3}
    rows = (folder / "rows.csv").read_text()
    monkeypatch.setattr(levels.Levels, "_errors", None)  # Nothing is measured again.
    measure(folder, "--seeds", "3")
    assert (folder / "rows.csv").read_text() == rows
    with pytest.raises(SystemExit):
        measure(folder, "--estimators", "KNN")
    assert "no such run of EDM on cifar16_1000" in capsys.readouterr().err
