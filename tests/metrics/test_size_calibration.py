"""Calibration of patch sizes to a network."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lit_knn.common.tables import read_rows
from lit_knn.estimators import Exact, Network, PatchPosterior
from lit_knn.metrics.same_noise import SameNoise
from lit_knn.metrics.size_calibration import best_sizes, compare_sizes, sized, trajectories
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.sampling.solvers import heun_step
from main import main
from tests import ROOT
from tests.command_lines import refusal_of
from tests.networks import write_own
from tests.toys import pixels

RUN = str(ROOT / "configs" / "figure5" / "digits.yaml")
NET = {"class_path": "lit_knn.nets.UNet"}
NET["init_args"] = {"in_channels": 1, "channels": 8, "multipliers": [1, 2], "blocks": 1}
NETWORK = {"class_path": "lit_knn.estimators.Network", "init_args": {"path": "one.ckpt", "net": NET}}
SMALL = {
    "networks": {"one": NETWORK},
    "estimator": {"class_path": "lit_knn.estimators.PatchPosterior", "init_args": {"size": 3}},
    "sizes": [1, 3],
    "folder": "results",
    "num_latents": 3,
}


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def calibrated(estimator, networks, sizes, source):
    made = {size: own.bind(source.reference) for size, own in sized(estimator, sizes).items()}
    rows = list(compare_sizes(made, networks, source))
    return best_sizes(rows), rows


def test_the_sizes_of_a_network_that_is_the_estimator_are_found():
    reference = ReferenceSet(pixels(12, (1, 6, 6)))
    network = PatchPosterior({0.05: 3, 5.0: 5}).bind(reference)  # The two levels meet at t = 0.5.
    grid = NoiseGrid(sigma_min=0.1, sigma_max=2.0)
    sizes, rows = calibrated(PatchPosterior(6), {"own": network}, [1, 3, 5], SameNoise(reference, 5, grid, 4))
    assert sizes == {t: 3 if t < 0.5 else 5 for t in grid.descending(5).tolist()}
    assert {3, 5} == set(sizes.values())
    assert len(rows) == 5 * 3
    for row in rows:
        assert row["mse"] > 1e-6 or row["size"] == sizes[row["t"]]
    # The table is what the estimator takes.
    again = PatchPosterior(sizes).bind(reference)
    z = pixels(2, (1, 6, 6)).float() / 255
    for t in sizes:
        torch.testing.assert_close(again.posterior_mean(z, t), network.posterior_mean(z, t))


def test_latents_are_on_the_trajectories_of_the_network_and_not_those_of_samples():
    reference = ReferenceSet(pixels(20, (1, 4, 4)))
    exact = Exact().bind(reference)
    source = SameNoise(reference, num_steps=6, batch_size=3)
    visited = trajectories(exact, source, 3, first_seed=5)
    assert [own.t for own in visited] == source.grid.descending(6).tolist()
    noise = seeded_noise([5, 6, 7], reference.shape)
    torch.testing.assert_close(visited[0].z, 80 * noise)
    # Each point is the end of the Heun step from the one before, not that step's predictor.
    for before, own in pairwise(visited):
        stepped = heun_step(before.z.double(), before.t, own.t, exact.posterior_mean)
        torch.testing.assert_close(own.z.double(), stepped, rtol=0, atol=1e-5)
    for own in visited:
        torch.testing.assert_close(own.mean, exact.posterior_mean(own.z, own.t))
    # The last mean is the sample.
    torch.testing.assert_close(visited[-1].mean, heun_sampler(exact.posterior_mean, noise, 6, source.grid))
    start, samples = trajectories(exact, source, 3)[0].z, source.grid.sigma_max * seeded_noise(range(100), (1, 4, 4))
    assert not (start[:, None] == samples).all((2, 3, 4)).any()


def arguments(**options):
    callback = {"class_path": "lit_knn.callbacks.SizeCalibration", "init_args": {**SMALL, **options}}
    Path("small.yaml").write_text(yaml.safe_dump({"trainer": {"enable_progress_bar": False, "callbacks": [callback]}}))
    data = ["--data", "Arrays", "--data.path", "images.npy", "--data.batch_size", "10", "--data.index", "TorchIndex"]
    return ["validate", "-c", RUN, "-c", "small.yaml", "--model.sampling_steps", "4", *data]


@pytest.fixture
def _files():
    np.save("images.npy", pixels(10, (1, 8, 8)).numpy())
    write_own("one.ckpt")


@pytest.mark.usefixtures("_files")
def test_a_run_writes_an_estimator_and_the_next_run_uses_its_comparisons(monkeypatch):
    main(arguments())
    folder = Path("runs/figure5_digits/estimator_0")
    curve = read_rows(folder / "size_calibration.csv")
    assert len(curve) == 4 * 2
    assert np.asarray(Image.open(folder / "size_calibration.png").convert("L")).std() > 5
    config = yaml.safe_load((folder / "calibrated.yaml").read_text())
    source = SameNoise(ReferenceSet(torch.from_numpy(np.load("images.npy"))), 4, batch_size=3)
    network = Network("one.ckpt", _net())
    expected, _ = calibrated(PatchPosterior(), {"one": network}, [1, 3], source)
    assert config["init_args"]["size"] == expected
    # A run takes the file, with other sizes; the comparisons of size 3 are at hand.
    seen, original = [], PatchPosterior.posterior_mean

    def watched(self, z, t, *args, **kwargs):
        seen.append((self.size, len(z)))
        return original(self, z, t, *args, **kwargs)

    monkeypatch.setattr(PatchPosterior, "posterior_mean", watched)
    main([*arguments(sizes=[3, 5]), "--model.estimator", str(folder / "calibrated.yaml")])
    assert {size for size, n in seen if n == 3} == {5}


def _net():
    from lit_knn.nets import UNet

    return UNet(**NET["init_args"])


@pytest.mark.usefixtures("_files")
def test_a_size_that_cannot_be_is_refused_in_one_line(capsys):
    assert "size=9" in refusal_of(arguments(sizes=[9]), capsys)
    assert not Path("results").exists()
