"""Runs of LitFlow on the command line: training, resuming, two ranks, sampling, measurements, and bad input."""

from pathlib import Path

import pytest

from lit_knn.common.tables import read_rows
from lit_knn.estimators import KNN
from lit_knn.modules import LitFlow
from main import main
from tests.command_lines import ROOT, refusal_of
from tests.interrupted_runs import At, assert_same, fit, interrupt, net

RUN = str(ROOT / "configs" / "flow" / "digits.yaml")
TINY = ["-c", RUN, "-c", str(ROOT / "tests" / "tiny.yaml"), "--model.net.channels", "8", "--model.sampling_steps", "3"]
TINY += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1"]

pytestmark = pytest.mark.filterwarnings("ignore:.* the default ")


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def flow():
    return LitFlow(net(), KNN(k=16, n=4), lr=1e-2, lr_ramp_up_images=300, ema_half_life_images=90)


def test_an_interrupted_run_goes_on_as_the_uninterrupted_one(tmp_path):
    _, whole = fit(tmp_path / "whole", flow(), 3)
    status, path = fit(tmp_path / "cut", flow(), 3, at=At(1, "on_after_backward", interrupt))
    assert status == 130
    assert_same(fit(tmp_path / "resumed", flow(), 3, path)[1], whole)


def test_a_run_trains_measures_plans_and_samples(tmp_path, capsys):
    main(["plan", *TINY])
    assert "network" in capsys.readouterr().out
    callbacks = ["--trainer.callbacks+", "lit_knn.callbacks.Memorisation", "--trainer.callbacks.num_samples", "70"]
    callbacks += ["--trainer.callbacks+", "lit_knn.callbacks.Fidelity", "--trainer.callbacks.num_samples", "70"]
    callbacks += ["--trainer.callbacks.extractor", "lit_knn.metrics.Pixels", "--trainer.callbacks.cache_dir", "null"]
    callbacks += ["--trainer.callbacks+", "lit_knn.callbacks.NetworkSpeed", "--trainer.callbacks.compile", "false"]
    logged = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs", "--trainer.log_every_n_steps", "1"]
    main(["fit", *TINY, *callbacks, *logged, "--trainer.precision", "bf16-mixed"])
    (log,) = Path("runs").rglob("metrics.csv")
    names = {name for row in read_rows(log) for name, value in row.items() if value}
    assert {"samples/fd_pixels", "samples/copied_fraction", "val/loss", "val/target_mse", "train/augmented"} <= names
    assert any(name.startswith("train/loss_t_0.25_to_0.5") for name in names)
    (path,) = Path("runs").rglob("last.ckpt")
    main(["report", str(path.parent.parent)])
    assert "k=256, n=64)" in capsys.readouterr().out
    euler = ["--model.sampler.solver", "lit_knn.sampling.solvers.euler_step"]
    for name, options in (("heun", []), ("euler", euler)):
        places = ["--trainer.logger.save_dir", name, "--data.predict_samples", "3"]
        main(["predict", *TINY, *options, *places, "--ckpt_path", str(path)])
        assert len(list(Path(name).rglob("00*.png"))) == 3
    other = ["--model.output", "lit_knn.nets.flow.DataOutput"]
    line = refusal_of(["predict", *TINY, *other, "--ckpt_path", str(path)], capsys)
    assert line.startswith(f"error: --ckpt_path {path}: the checkpoint is of ")
    assert "another parameterisation: {'output': 'VelocityOutput'}, but the model has {'output': 'DataOutput'}" in line
