"""Samples of estimators alone, on both sides of t_switch, and measured against held-out images."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits

from lit_knn.data import Digits
from lit_knn.estimators import Exact
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from main import main

MODEL = ["--model", "LitEstimator", "--model.sampling_steps", "18", "--trainer.accelerator", "cpu"]
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs"]
HELD_OUT = ["--data.held_out", "100", "--data.train_images", "300", "--data.batch_size", "50"]
EXACT = {"class_path": "lit_knn.estimators.Exact"}
PATCH = {"class_path": "lit_knn.estimators.PatchPosterior", "init_args": {"size": 3}}
SMOOTHED = {"class_path": "lit_knn.estimators.Smoothed", "init_args": {"estimator": EXACT, "width": 0.6, "n": 2}}
PIXELS = {"num_samples": 60, "batch_size": 30}
SWEEP = {"t_switch": [2.0], "folder": "results", "num_samples": 20, "num_steps": 8, "batch_size": 10}
SWEEP |= {"extractor": {"class_path": "lit_knn.metrics.Pixels"}, "cache_dir": None, "held_out": True}


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def validate(callbacks, *args, data=HELD_OUT):
    """Run these callbacks on a part of the digits."""
    listed = [{"class_path": f"callbacks.{name}", "init_args": options} for name, options in callbacks.items()]
    Path("callbacks.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": listed}}))
    main(["validate", *MODEL, *QUIET, "--data", "Digits", *data, "-c", "callbacks.yaml", *args])


def rows(pattern):
    (path,) = Path().rglob(pattern)
    with path.open() as file:
        return list(csv.DictReader(file))


def scipy_distance(a, b):
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b) - 2 * np.trace(sqrtm(cov_a @ cov_b)).real


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_the_distance_is_to_the_images_that_are_in_no_reference_set_and_copies_are_of_the_training_images():
    both = {"PixelFrechetDistance": {**PIXELS, "held_out": True}, "Memorisation": {"num_samples": 60, "batch_size": 30}}
    validate(both, "--model.estimator", "Exact")
    data = Digits(held_out=100)
    data.setup()
    assert data.reference.N == 1697
    data = Digits(held_out=100, train_images=300)
    data.setup()
    exact = Exact().bind(data.reference)
    samples = heun_sampler(exact.posterior_mean, seeded_noise(range(60), (1, 8, 8))).flatten(1).double().numpy()
    kept = data.held_out_reference.gather(torch.arange(100)).flatten(1).double().numpy()
    everything = np.rint(load_digits().data * 255 / 16) / 127.5 - 1
    assert np.abs(kept[:, None] - everything[None]).max(2).min(1).max() < 1e-6
    logged = rows("metrics.csv")[0]
    assert float(logged["samples/fd_pixels_held_out"]) == pytest.approx(scipy_distance(samples, kept), rel=1e-3)
    assert "samples/fd_pixels" not in logged
    assert float(logged["samples/copied_fraction"]) > 0.9
    assert rows("fidelity.csv")[0]["fd_pixels_held_out"]


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_any_estimator_may_be_above_and_below_t_switch_and_draws_its_own_numbers():
    estimators = {"Exact": EXACT, "PatchPosterior": PATCH}
    found = {}
    for name, network in {"Exact": EXACT, "PatchPosterior": PATCH, "Smoothed": SMOOTHED, "again": SMOOTHED}.items():
        torch.manual_seed(len(found))
        chosen = {} if network is SMOOTHED else estimators
        validate({"HybridSampling": {**SWEEP, "network": network, "folder": name, "estimators": chosen}})
        table = rows(f"{name}/hybrid_sampling_fd_pixels_held_out.csv")
        found[name] = {row["method"]: row for row in table}
    one, again = (found[name]["forward"]["fd_pixels_held_out"] for name in ("Smoothed", "again"))
    assert one == again, "the draws do not depend on the global generator"
    # Below t_switch, the exact mean ends at training images, whatever is above; patches do not.
    for method in ("Exact", "PatchPosterior", "forward"):
        assert float(found["Exact"][method]["copied_fraction"]) > 0.9
        assert float(found["PatchPosterior"][method]["copied_fraction"]) < 0.5


@pytest.mark.parametrize(
    ("callback", "options", "data", "words"),
    [
        ("PixelFrechetDistance", {**PIXELS, "held_out": True}, (), ["PixelFrechetDistance: held_out", "data.held_out"]),
        ("PixelFrechetDistance", {**PIXELS, "held_out": True}, ("--data.held_out", "1"), ["2 images, there is 1"]),
        ("HybridSampling", {"network": EXACT}, (), ["HybridSampling: held_out=true", "set data.held_out"]),
        (
            "HybridSampling",
            {"network": {"class_path": "Switched", "init_args": {"below": PATCH, "above": EXACT, "t": 100.0}}},
            HELD_OUT,
            ["HybridSampling: network: Switched: t=100"],
        ),
    ],
)
def test_what_cannot_be_measured_or_sampled_is_told_in_one_line(callback, options, data, words, capsys):
    if callback == "HybridSampling":
        options = {**SWEEP, "estimators": {"Exact": EXACT}, **options}
    with pytest.raises(SystemExit):
        validate({callback: options}, "--model.estimator", "Exact", data=data)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    for word in words:
        assert word in line
    assert not list(Path().rglob("*.csv"))
