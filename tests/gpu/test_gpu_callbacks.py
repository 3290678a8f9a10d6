"""Every callback works on a GPU, or on its stand-in."""

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

import callbacks
from lit_knn.common.tables import read_rows
from main import main
from tests import ROOT
from tests.networks import write_own
from tests.toys import pixels

QUIET = [
    "--trainer.logger",
    "CSVLogger",
    "--trainer.logger.name",
    "run",
    "--trainer.logger.save_dir",
    "runs",
]
QUIET += [
    "--trainer.enable_model_summary",
    "false",
    "--trainer.devices",
    "1",
    "--trainer.num_sanity_val_steps",
    "0",
]
STF = {"class_path": "lit_knn.estimators.STF", "init_args": {"n": 8}}
KNN = {"class_path": "lit_knn.estimators.KNN", "init_args": {"k": 16, "n": 8}}
PIXELS = {"class_path": "lit_knn.metrics.Pixels"}
UNET = {"class_path": "lit_knn.nets.UNet"}
UNET["init_args"] = {"in_channels": 1, "channels": 8, "multipliers": [1, 2], "blocks": 1}
NETWORK = {
    "class_path": "lit_knn.estimators.Network",
    "init_args": {"path": "network.ckpt", "net": UNET},
}
SWEEP = {
    "estimators": {"KNN": KNN},
    "t_switch": [1.0],
    "num_samples": 6,
    "num_steps": 2,
    "batch_size": 6,
}
FIDELITY = {
    "num_samples": 12,
    "batch_size": 12,
    "extra_metrics": ["kid", "precision", "recall"],
    "kid_subset_size": 6,
}
FIDELITY |= {"extractor": PIXELS, "cache_dir": None}
MEASURING = {
    "EstimatorError": {
        "estimators": {"KNN": KNN, "STF": STF},
        "noise_levels": [5.0],
        "num_z": 30,
        "repeats": 2,
    },
    "MeanPicture": {"estimators": {"KNN": KNN, "STF": STF}, "noise_levels": [5.0], "num_images": 1},
    "HybridSampling": {
        **SWEEP,
        "network": NETWORK,
        "folder": "sweep",
        "extractor": PIXELS,
        "cache_dir": None,
    },
    "Memorisation": {"num_samples": 12, "batch_size": 12},
    "FreeParticles": {
        "estimators": {"KNN": KNN},
        "num_particles": 16,
        "steps": 2,
        "every_n_steps": 1,
    },
    "Fidelity": FIDELITY,
    "SampleGrid": {"num_samples": 4, "num_steps": [2]},
}
TRAINING = {
    "CheckpointByImages": {"every_n_images": 32},
    "PowerAverages": {"every_n_images": 32},
    "NetworkSpeed": {"compile": False},  # The stand-in cannot compile.
    "StepProgressBar": {},
    "PixelFrechetDistance": {"num_samples": 12, "batch_size": 12},
}
# Every run has the last four.
ELSEWHERE = {"PosteriorPicture", "SampleWriter", "LastCheckpoint", "RunRecord", "RunSummary"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*rank-deficient"),
    pytest.mark.usefixtures("own_folder"),
]


def run(command, chosen, *args):
    """Run a command line with these callbacks; return the folder of its results."""
    listed = [
        {"class_path": f"callbacks.{name}", "init_args": options}
        for name, options in chosen.items()
    ]
    Path("callbacks.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": listed}}))
    main([command, *args, *QUIET, "--trainer.accelerator", "gpu", "-c", "callbacks.yaml"])
    return max(Path("runs/run").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_each_callback_has_a_test():
    assert {*MEASURING, *TRAINING} | ELSEWHERE == set(callbacks.__all__)


@pytest.mark.usefixtures("blank_figures")
def test_every_measurement_leaves_its_results():
    np.save("images.npy", pixels(60, (1, 8, 8)).numpy())
    write_own("network.ckpt")
    args = [
        "--data",
        "Arrays",
        "--data.path",
        "images.npy",
        "--data.batch_size",
        "20",
        "--data.val_images",
        "20",
    ]
    args += ["--data.index", "TorchIndex", "--model", "LitEstimator", "--model.estimator", "Exact"]
    folder = run("validate", MEASURING, *args, "--model.sampling_steps", "3")
    assert {"estimator_error.csv", "metrics.csv"} <= {path.name for path in folder.rglob("*.csv")}
    numbers = {
        name: value for name, value in read_rows(folder / "metrics.csv")[-1].items() if value
    }
    assert {
        "samples/fd_pixels",
        "samples/kid",
        "samples/precision",
        "samples/copied_fraction",
    } <= numbers.keys()
    assert all(math.isfinite(float(value)) for value in numbers.values())


def test_half_precision_run_by_class_trains_and_is_judged():
    args = [
        "-c",
        str(ROOT / "configs" / "table1" / "digits_conditional.yaml"),
        "--model.net.channels",
        "4",
    ]
    args += [
        "--model.net.multipliers",
        "[1]",
        "--model.estimator.k",
        "32",
        "--model.estimator.n",
        "8",
    ]
    args += ["--data.index", "TorchIndex", "--data.batch_size", "32", "--data.val_images", "32"]
    args += ["--trainer.precision", "bf16-mixed"]
    steps = [
        "--trainer.max_steps",
        "2",
        "--trainer.val_check_interval",
        "1",
        "--trainer.log_every_n_steps",
        "1",
    ]
    folder = run("fit", TRAINING, *args, *steps)
    last = folder / "checkpoints" / "last.ckpt"
    assert len(list(last.parent.iterdir())) == 3
    assert len(list((folder / "snapshots").iterdir())) == 2
    rows = read_rows(folder / "metrics.csv")
    for name in ("train/loss", "val/loss", "samples/fd_pixels"):
        values = [float(row[name]) for row in rows if row.get(name)]
        assert values, name
        assert all(0 < value < 1e3 for value in values), name

    main(["best", "--run", str(folder)])
    assert len(read_rows(folder / "checkpoints_fd_pixels.csv")) == 2
    options = [
        "--ckpt_path",
        str(last),
        "--data.predict_samples",
        "5",
        "--sample_writer.folder",
        "samples",
    ]
    run("predict", {}, *args, *options, "--sample_writer.format", "npz")
    assert [path.name for path in Path("samples").iterdir()] == ["samples.npz"]


def test_the_picture_of_a_posterior_is_drawn():
    folder = run(
        "validate", {"PosteriorPicture": {}}, "-c", str(ROOT / "configs" / "figure1" / "toy.yaml")
    )
    assert (folder / "figure1.png").exists()
