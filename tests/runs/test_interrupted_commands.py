"""Command lines that are interrupted, resumed, or that would lose what an earlier run has left."""

import os
import shlex
import signal
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger

from lit_knn.runs.folder import checkpoints_of_name
from main import main
from tests import ROOT
from tests.interrupted_runs import file_size_limit, killed

ARGS = ["-c", str(ROOT / "configs/demo.yaml"), "-c", "small.yaml"]
ARGS += ["--model.net.channels", "4", "--model.net.multipliers", "[1]", "--model.estimator.k", "16"]
ARGS += ["--model.estimator.n", "4"]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configure()


def configure(*callbacks):
    trainer = {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    trainer["callbacks"] = list(callbacks)
    config = {"trainer": trainer, "data": {"init_args": {"batch_size": 32, "val_images": 32}}}
    Path("small.yaml").write_text(yaml.safe_dump(config))


def fit(steps, *args):
    main(["fit", *ARGS, "--trainer.max_steps", str(steps), *args])


def last(version=0):
    return Path(f"runs/demo/knn_{version}/checkpoints/last.ckpt")


def refused(capsys, command, *args, status=2):
    """Run a command that must end in one line and change no file; return the line."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    with pytest.raises(SystemExit) as stop:
        main([command, *ARGS, *map(str, args)])
    assert stop.value.code == status
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    return line


def test_an_interrupted_command_says_the_command_that_goes_on(capsys):
    # The second command has resumed already, and so says the newer checkpoint alone.
    for step, *resumed in [(2,), (4, "--ckpt_path", str(last()))]:
        configure(killed("KilledAt", step=step, hook="on_after_backward", signum=int(signal.SIGTERM)))
        with pytest.raises(SystemExit) as stop:
            fit(6, *resumed)
        assert stop.value.code == 143
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("interrupted")]
        said = f"interrupted by SIGTERM after step {step + 1}; to go on: lit-knn fit -c "
        assert line.startswith(said)
        assert line.endswith(f"--ckpt_path {last()}")
        assert line.count("--ckpt_path") == 1
    main(shlex.split(line)[shlex.split(line).index("lit-knn") + 1 :])
    assert torch.load(last(), weights_only=True)["global_step"] == 6


@pytest.mark.parametrize(
    ("command", "hook", "signum", "status"),
    [
        ("validate", "on_validation_batch_start", signal.SIGTERM, 143),
        ("validate", "on_validation_end", signal.SIGINT, 130),
        ("predict", "on_predict_batch_end", signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_a_command_without_training_at_once(command, hook, signum, status, capsys):
    killer = killed("KilledAt", step=0, hook=hook, signum=int(signum))
    Path("killed.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [killer], "logger": False}}))
    model = ["--model", "LitEstimator", "--model.estimator", "Exact"]
    model += ["--model.sigma_max", "2", "--model.sampling_steps", "4"]
    data = ["--data", "Digits", "--data.batch_size", "2", "--data.val_images", "4", "--data.predict_samples", "4"]
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as stop:
        main([command, *model, *data, "-c", "killed.yaml", "--trainer.accelerator", "cpu"])
    assert stop.value.code == status
    assert signal.getsignal(signum) is before
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in printed
    # The second batch of samples was not drawn.
    assert not list(Path("runs").rglob("000002.png"))


def test_last_is_the_newest_whole_checkpoint_of_the_name(capsys):
    assert "--ckpt_path last: found none in runs/demo; it needs" in refused(capsys, "fit", "--ckpt_path", "last")
    fit(2)
    fit(3, "--ckpt_path", "last", "--trainer.logger.version", "knn_1")
    fit(1, "--trainer.logger.name", "another")
    assert yaml.safe_load(Path("runs/demo/knn_1/config.yaml").read_text())["ckpt_path"] == str(last(0))
    content = bytearray(last(1).read_bytes())
    content[len(content) // 2] ^= 4
    last(1).write_bytes(content)
    with pytest.warns(UserWarning, match=r"knn_1.* is damaged: .*an older checkpoint is used"):
        fit(4, "--ckpt_path", "last", "--trainer.logger.version", "knn_2")
    assert yaml.safe_load(Path("runs/demo/knn_2/config.yaml").read_text())["ckpt_path"] == str(last(0))
    assert "is damaged: the checksum" in refused(capsys, "fit", "--ckpt_path", last(1))
    checkpoint = torch.load(last(2), weights_only=True)
    del checkpoint["optimizer_states"]
    torch.save(checkpoint, last(2))
    assert "cannot be resumed from: the checkpoint has no opt" in refused(capsys, "fit", "--ckpt_path", last(2))
    with pytest.warns(UserWarning, match=r"knn_2.* has no optimizer_states; an older checkpoint is used"):
        fit(4, "--ckpt_path", "last")


@pytest.mark.parametrize("logger", [True, {"name": "own"}, {"name": None}, {"save_dir": "elsewhere"}])
def test_last_is_looked_for_where_the_logger_of_the_options_writes(logger):
    options = {"default_root_dir": "root", "logger": logger}
    if isinstance(logger, dict):
        folder = Path(CSVLogger(**{"save_dir": "root", **logger}).log_dir)
        options["logger"] = [{"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": logger}]
    else:
        trainer = pl.Trainer(**options, enable_progress_bar=False, accelerator="cpu")
        folder = Path(trainer.log_dir)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    assert checkpoints_of_name(options) == [folder / "checkpoints" / "last.ckpt"]


def test_last_is_of_a_run_with_the_same_estimator(capsys):
    Path("own.yaml").write_text("class_path: lit_knn.estimators.SubspaceKNN\ninit_args: {r: 16, n: 8}\n")
    fit(2)
    fit(3, "--model.estimator", "own.yaml")
    for version, options in (("knn_0", []), ("subspace_knn_0", ["--model.estimator", "own.yaml"])):
        fit(4, "--ckpt_path", "last", *options)
        run = Path("runs/demo", version)
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert config["ckpt_path"] == str(run / "checkpoints" / "last.ckpt")
    line = refused(capsys, "fit", "--ckpt_path", "last", "--model.estimator", "TopK")
    assert (
        "found none in runs/demo; it needs a whole last.ckpt of a run with this name, model, estimator and --seed"
        in line
    )


def test_a_longer_run_is_not_overwritten(capsys):
    fit(3, "--trainer.logger.version", "7")
    line = refused(capsys, "fit", "--trainer.max_steps", 9, "--trainer.logger.version", 7)
    own = Path("runs/demo/version_7/checkpoints/last.ckpt")
    assert f"{own} has 3 steps, and this run, from step 0, would overwrite it" in line
    # Resumed in its own folder it goes on.
    fit(4, "--trainer.logger.version", "7", "--ckpt_path", str(own))
    assert torch.load(own, weights_only=True)["global_step"] == 4
    own.write_bytes(b"damaged")
    assert "would overwrite it" in refused(capsys, "fit", "--trainer.logger.version", 7)


def test_bad_checkpoints_are_refused(capsys):
    fit(1)
    assert "it is refused" in refused(capsys, "predict", "--ckpt_path", last(), "--weights_only", "false")
    content = torch.load(last(), weights_only=True)
    next(iter(content["state_dict"].values()))[0] = torch.nan
    torch.save(content, "nan.ckpt")
    assert "nan.ckpt has weights that are not finite" in refused(capsys, "predict", "--ckpt_path", "nan.ckpt")


def test_folders_that_cannot_be_written_end_in_one_line(capsys):
    Path("taken").write_text("a file")
    assert "taken" in refused(capsys, "fit", "--trainer.logger.save_dir", "taken")
    assert "File name too long" in refused(capsys, "fit", "--trainer.logger.save_dir", "n" * 300)
    assert "/proc/none" in refused(capsys, "fit", "--trainer.logger.save_dir", "/proc/none")


def test_a_full_disk_ends_a_training_in_one_line(capsys):
    with file_size_limit(20_000), pytest.raises(SystemExit) as stop:
        fit(2, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs", "--trainer.logger.name", "demo")
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: {last()} cannot be written: File too large"
    assert not os.listdir(last().parent)


def test_steps_that_are_done_already(capsys):
    fit(3)
    line = refused(capsys, "fit", "--trainer.max_steps", 2, "--ckpt_path", last())
    assert line == f"error: --trainer.max_steps 2: {last()} has 3 steps already; give more"
    capsys.readouterr()
    fit(3, "--ckpt_path", str(last()))
    assert f"Checkpoint:   {last()}" in capsys.readouterr().out
