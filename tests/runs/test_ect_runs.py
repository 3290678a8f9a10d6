"""Consistency tuning by the command line: the config of the digits, its checkpoints, and two ranks."""

import shutil
from pathlib import Path

import pytest
import torch

from main import main
from tests.command_lines import ROOT, refusal_of
from tests.networks import write_own

SMALL = ["-c", str(ROOT / "configs" / "ect" / "digits.yaml"), "-c", str(ROOT / "tests" / "tiny.yaml")]
SMALL += ["--model.net.channels", "8", "--model.estimator.k", "32", "--model.estimator.n", "8"]


@pytest.fixture(autouse=True)
def start(tmp_path, monkeypatch):
    """A trained network, with the layer for augmentation labels that tuning leaves out."""
    monkeypatch.chdir(tmp_path)
    return write_own("start.ckpt", augment_dim=9)


def logged(args):
    return [*SMALL, *args, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs"]


def test_a_tuned_model_goes_on_and_samples_without_the_file_it_started_from(start):
    steps = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    main(["fit", *logged(steps), "--model.start", str(start), "--model.predict_steps", "2"])
    (path,) = Path("runs").rglob("last.ckpt")
    kept = shutil.copy(path, "kept.ckpt")
    start.unlink()
    alone = ["--model.start", "null", "--ckpt_path", str(kept)]
    main(["fit", *logged(alone), "--trainer.max_steps", "3", "--trainer.logger.version", "resumed"])
    (resumed,) = Path("runs").rglob("*resumed/checkpoints/last.ckpt")
    assert torch.load(resumed, weights_only=True)["global_step"] == 3
    main(["validate", *logged(alone)])
    measured = [path for path in Path("runs").rglob("metrics.csv") if "fd_pixels" in path.read_text()]
    assert len(measured) == 3  # of both runs, which are validated at their ends, and of the validation
    writer = ["--sample_writer.folder", "samples", "--sample_writer.format", "npz"]
    writer += ["--data.predict_samples", "3"]
    main(["predict", *logged(alone), *writer, "--model.predict_steps", "2"])
    assert list(Path("samples").glob("*.npz"))


def test_a_start_that_is_missing_is_told_in_one_line(capsys):
    line = refusal_of(["fit", *logged([]), "--model.start", "gone.ckpt"], capsys)
    assert line == "error: LitECT: start=gone.ckpt: no such file"
    line = refusal_of(["fit", *logged([]), "--model.start", "null"], capsys)
    assert line == "error: LitECT: start=null has no trained network: give a start, or --ckpt_path to go on"
