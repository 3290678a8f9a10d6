"""Training, resuming, validation and sampling by the command line on a GPU, or on its stand-in."""

import csv
from pathlib import Path

import pytest
import torch
import yaml

from lit_knn.common.tables import read_rows
from main import main
from tests import ROOT
from tests.interrupted_runs import state
from tests.pretend_cuda import PretendTensor

GPU = ["--trainer.accelerator", "gpu", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"]
GPU += ["--trainer.enable_model_summary", "false", "--trainer.logger", "CSVLogger"]
SMALL = ["--model.net.channels", "4", "--model.net.multipliers", "[1]"]
SMALL += ["--data.batch_size", "32", "--data.val_images", "32"]
KNN = ["--model.estimator.k", "32", "--model.estimator.n", "8"]
WRITER = ["--sample_writer.format", "npz", "--sample_writer.folder", "samples"]
CALLBACKS = [
    {"class_path": "lit_knn.callbacks.CheckpointByImages", "init_args": {"every_n_images": 64}},
    {"class_path": "lit_knn.callbacks.PixelFrechetDistance", "init_args": {"num_samples": 20, "batch_size": 10}},
]
HALF = ["--trainer.precision", "bf16-mixed"]
# Consistency training, denoising with every kind of target, and both by class in half precision.
RUNS = {
    "table1/digits": ["--data.index", "TorchIndex", "--data.hflip", "true", "--model.net.dropout", "0.2"],
    "table2/digits": ["--model.augmentation.p", "0.5", "--model.warped", "posterior", "--model.sampling_steps", "3"],
    "table2/digits_conditional": [*HALF, "--model.warped", "source", "--model.sampling_steps", "2"],
    "table1/digits_conditional": [*HALF, "--trainer.accumulate_grad_batches", "2"],
}

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def options(run, folder, *callbacks):
    Path("callbacks.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": list(callbacks)}}))
    logger = ["--trainer.logger.save_dir", str(folder), "--trainer.logger.name", "run"]
    config = ["-c", str(ROOT / "configs" / f"{run}.yaml"), "-c", "callbacks.yaml"]
    return [*config, *GPU, *SMALL, *KNN, *logger, *RUNS[run]]


def fit(run, folder, steps, *more):
    """Train, with a validation every third step; return the run's folder and its last checkpoint."""
    few = ["--trainer.max_steps", str(steps), "--trainer.val_check_interval", "3", "--trainer.log_every_n_steps", "1"]
    main(["fit", *options(run, folder, *CALLBACKS), *few, *more])
    version = sorted(Path(folder, "run").iterdir())[-1]
    return version, version / "checkpoints" / "last.ckpt"


def logged(version, name):
    return [float(row[name]) for row in read_rows(version / "metrics.csv") if row.get(name)]


def assert_same(path, other):
    """A resumed run is the uninterrupted one; kernels of a real GPU may round differently each time."""
    ours, theirs = state(path), state(other)
    assert ours.keys() == theirs.keys()
    exact = isinstance(torch.empty(0, device="cuda"), PretendTensor)
    for name, value in ours.items():
        if not isinstance(value, torch.Tensor):
            assert value == theirs[name], name
        elif exact:
            assert torch.equal(value, theirs[name]), name
        else:
            torch.testing.assert_close(value, theirs[name], rtol=1e-2, atol=1e-4, msg=name)


# Runs resume on the stand-in in tests/gpu/test_no_waiting.py, too, and the next test runs commands there.
@pytest.mark.slow
@pytest.mark.parametrize("run", ["table1/digits", "table2/digits"])
def test_a_resumed_run_is_the_uninterrupted_one_and_can_be_used(run):
    version, whole = fit(run, "whole", 6)
    assert len(logged(version, "train/loss")) == 6
    assert len(logged(version, "val/loss")) == len(logged(version, "samples/fd_pixels")) == 2
    assert len(logged(version, "train/images_per_s")) == 6
    _, part = fit(run, "part", 4)
    _, resumed = fit(run, "part", 6, "--ckpt_path", str(part))
    assert_same(resumed, whole)

    main(["validate", *options(run, "validation", *CALLBACKS[1:]), "--ckpt_path", str(whole)])
    again = sorted(Path("validation/run").iterdir())[-1]
    for name in ("val/loss", "samples/fd_pixels"):
        assert logged(again, name) == pytest.approx(logged(version, name)[-1:], rel=1e-3)
    main(["predict", *options(run, "sampling"), *WRITER, "--ckpt_path", str(whole), "--data.predict_samples", "5"])
    assert sorted(path.name for path in Path("samples").iterdir()) == ["grid.png", "samples.npz"]


@pytest.mark.parametrize("run", ["table1/digits_conditional", "table2/digits_conditional"])
def test_classes_in_half_precision_train_and_the_best_checkpoint_is_found(run):
    version, _ = fit(run, "whole", 3, "--data.index", "TorchIndex")
    assert all(0 < loss < 1e3 for loss in logged(version, "train/loss") + logged(version, "val/loss"))
    if run.startswith("table1"):
        main(["best", "--run", str(version)])
        with (version / "checkpoints_fd_pixels.csv").open() as file:
            assert [float(row["fd_pixels"]) > 0 for row in csv.DictReader(file)] == [True] * 3
        main(["report", str(version)])
