"""Every callback works on a GPU, or on its stand-in, and what it measures is what it measures on the CPU."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import callbacks
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.common.tables import read_rows
from lit_knn.metrics.features import EfficientNetLite0, InceptionV3
from lit_knn.reference import ReferenceSet
from main import main
from tests import ROOT
from tests.networks import write_own
from tests.toys import pixels

QUIET = ["--trainer.logger", "CSVLogger", "--trainer.logger.name", "run"]
QUIET += ["--trainer.enable_model_summary", "false", "--trainer.devices", "1", "--trainer.num_sanity_val_steps", "0"]
STF = {"class_path": "lit_knn.estimators.STF", "init_args": {"n": 8}}
KNN = {"class_path": "lit_knn.estimators.KNN", "init_args": {"k": 16, "n": 8}}
PIXELS = {"class_path": "lit_knn.metrics.Pixels"}
UNET = {"class_path": "lit_knn.nets.UNet"}
UNET["init_args"] = {"in_channels": 1, "channels": 8, "multipliers": [1, 2], "blocks": 1}
NETWORK = {"class_path": "lit_knn.estimators.Network", "init_args": {"path": "network.ckpt", "net": UNET}}
SWEEP = {"estimators": {"KNN": KNN}, "t_switch": [1.0], "num_samples": 10, "num_steps": 3, "batch_size": 5}
AGREEMENT = {"networks": {"one": NETWORK}, "estimators": {}, "noise_levels": [0.5], "folder": "agreement"}
AGREEMENT |= {"images": ["training", "generated"], "num_images": 8, "num_latents": 6, "batch_size": 5}
PATCHES = {"class_path": "lit_knn.estimators.PatchPosterior"}
SIZES = {"networks": {"one": NETWORK}, "estimator": PATCHES, "sizes": [2, 4], "folder": "sizes", "num_latents": 4}
FIDELITY = {"num_samples": 12, "batch_size": 6, "extra_metrics": ["kid", "precision", "recall"], "kid_subset_size": 6}
MEASURING = {
    "EstimatorError": {"estimators": {"KNN": KNN, "STF": STF}, "noise_levels": [0.5, 5.0], "num_z": 30, "repeats": 2},
    "MeanPicture": {"estimators": {"KNN": KNN, "STF": STF}, "noise_levels": [0.5, 5.0], "num_images": 1},
    "HybridSampling": {**SWEEP, "network": NETWORK, "folder": "sweep", "extractor": PIXELS, "cache_dir": None},
    "NetworkAgreement": AGREEMENT,
    "SizeCalibration": SIZES,
    "Memorisation": {"num_samples": 12, "batch_size": 6},
    "Fidelity": {**FIDELITY, "extractor": PIXELS, "cache_dir": "cache"},
    "PixelFrechetDistance": {"num_samples": 12, "batch_size": 6},
    "SampleGrid": {"num_samples": 4, "num_steps": [2]},
}
TRAINING = {
    "CheckpointByImages": {"every_n_images": 32},
    "PowerAverages": {"every_n_images": 32},
    "NetworkSpeed": {"compile": False},  # The stand-in cannot compile.
    "StepProgressBar": {},
}
# Like NetworkAgreement, which takes the same path on a GPU, but for its comparison of sizes.
LONG = ("SizeCalibration",)
# Tests of their own, here and in test_gpu_training.py.
ELSEWHERE = {"PosteriorPicture", "SampleWriter", "LastCheckpoint", "RunRecord", "RunSummary"}

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*rank-deficient")]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(command, device, chosen, *args):
    """Run a command line with these callbacks; return the folder of its results."""
    listed = [{"class_path": f"callbacks.{name}", "init_args": options} for name, options in chosen.items()]
    Path("callbacks.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": listed}}))
    where = ["--trainer.accelerator", device, "--trainer.logger.save_dir", "runs"]
    main([command, *args, *QUIET, *where, "-c", "callbacks.yaml"])
    return max(Path("runs/run").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_each_callback_has_a_test():
    assert {*MEASURING, *TRAINING} | ELSEWHERE == set(callbacks.__all__)


def numbers(folder, name):
    rows = read_rows(folder / name)
    return [{key: value for key, value in row.items() if key not in ("seconds", "settings")} for row in rows]


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in MEASURING])
def test_a_measurement_is_that_of_the_cpu(name):
    np.save("images.npy", pixels(60, (1, 8, 8)).numpy())
    write_own("network.ckpt")
    data = ["--data", "Arrays", "--data.path", "images.npy", "--data.batch_size", "20", "--data.val_images", "20"]
    data += ["--data.index", "TorchIndex"]
    model = ["--model", "LitEstimator", "--model.estimator", "Exact", "--model.sampling_steps", "4"]
    folders = {}
    for device in ("gpu", "cpu"):
        options = dict(MEASURING[name])
        if "folder" in options:
            options["folder"] = device
        folders[device] = run("validate", device, {name: options}, *model, *data)
    assert {path.name for path in folders["gpu"].rglob("*")} == {path.name for path in folders["cpu"].rglob("*")}
    _compare(folders["gpu"], folders["cpu"], tolerance=0.5 if name == "EstimatorError" else 0.02)


def _compare(ours, theirs, tolerance):
    """Samples depend on seeds alone and are alike; estimates draw with the device's own numbers."""
    for path in theirs.rglob("*/step*.png"):
        pictures = [np.asarray(Image.open(folder / path.relative_to(theirs))).astype(int) for folder in (ours, theirs)]
        assert np.abs(pictures[0] - pictures[1]).max() <= 2
    if (theirs / "metrics.csv").exists():
        found = numbers(ours, "metrics.csv")[-1]
        for column, value in numbers(theirs, "metrics.csv")[-1].items():
            if value and column not in ("epoch", "step"):
                assert float(found[column]) == pytest.approx(float(value), rel=tolerance, abs=0.05), column


def test_callbacks_of_training_do_their_work():
    chosen = {**TRAINING, "Fidelity": {**FIDELITY, "extractor": PIXELS, "cache_dir": None}}
    args = ["-c", str(ROOT / "configs" / "table1" / "digits.yaml"), "--model.net.channels", "4"]
    args += ["--model.estimator", "OneSample", "--data.batch_size", "32", "--data.val_images", "32"]
    args += ["--trainer.max_steps", "3", "--trainer.val_check_interval", "2"]
    folder = run("fit", "gpu", chosen, *args)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert "last.ckpt" in names
    assert len(names) == 4
    assert len(list((folder / "snapshots").iterdir())) == 3
    (row,) = numbers(folder, "fidelity.csv")
    assert {"fd_pixels", "kid", "precision", "recall"} <= row.keys()


def test_the_picture_of_a_posterior_is_drawn():
    folder = run("validate", "gpu", {"PosteriorPicture": {}}, "-c", str(ROOT / "configs" / "figure1" / "toy.yaml"))
    assert (folder / "figure1.png").exists()


def test_features_of_networks_are_those_of_the_cpu(random_weights):
    images = ReferenceSet(pixels(2, (3, 32, 32))).gather(torch.arange(2))
    for extractor in (InceptionV3(random_weights), EfficientNetLite0()):
        found = {}
        for device in ("cpu", "cuda"):
            extractor.load((3, 32, 32), device)
            found[device] = [part for part in extractor(images.to(device)) if part is not None]
        for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
            assert ours.is_cuda
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item())


def test_a_stopwatch_in_use_is_copied_empty():
    # An average of the weights copies the module, and an event of CUDA cannot be copied.
    watch = Stopwatch(torch.device("cuda"))
    with watch.measure():
        torch.ones(2, device="cuda").sum()
    assert copy.deepcopy(watch).read_and_reset() == 0
    assert watch.read_and_reset() > 0
