"""Command lines that are interrupted, resumed, or that would lose what an earlier run has left."""

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
from tests.command_lines import DEMO, TINY, refusal_of
from tests.interrupted_runs import killed

ARGS = ["-c", DEMO, *TINY, "--model.net.channels", "4", "--model.net.multipliers", "[1]"]
ARGS += ["--trainer.limit_val_batches", "0", "--trainer.callbacks", "[]"]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def killer(**options):
    """Options of a run that a signal ends."""
    trainer = {"callbacks": [killed("KilledAt", **options)]}
    Path("killed.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    return "-c", "killed.yaml"


def fit(steps, *args):
    main(["fit", *ARGS, "--trainer.max_steps", str(steps), *args])


def last(version=0):
    return Path(f"runs/demo/knn_{version}/checkpoints/last.ckpt")


def refused(capsys, command, *args):
    """Run a command that must end in one line and change no file; return the line."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    line = refusal_of([command, *ARGS, *map(str, args)], capsys)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    return line


def start_of(version):
    """The checkpoint that a run was resumed from, as its configuration tells."""
    return yaml.safe_load(Path("runs/demo", version, "config.yaml").read_text())["ckpt_path"]


def test_an_interrupted_command_says_the_command_that_goes_on(capsys):
    # The second command has resumed already, and so says the newer checkpoint alone.
    for step, *resumed in [(2,), (4, "--ckpt_path", str(last()))]:
        with pytest.raises(SystemExit) as stop:
            fit(6, *resumed, *killer(step=step, hook="on_after_backward", signum=int(signal.SIGTERM)))
        assert stop.value.code == 143
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("interrupted")]
        assert line.startswith(f"interrupted by SIGTERM after step {step + 1}; to go on: lit-knn fit -c ")
        assert line.endswith(f"--ckpt_path {last()}")
        assert line.count("--ckpt_path") == 1
    main(shlex.split(line)[shlex.split(line).index("lit-knn") + 1 :])
    assert torch.load(last(), weights_only=True)["global_step"] == 6


@pytest.mark.parametrize(
    ("command", "hook", "signum"),
    [
        ("validate", "on_validation_batch_start", signal.SIGTERM),
        ("validate", "on_validation_end", signal.SIGINT),
        ("predict", "on_predict_batch_end", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_command_without_training_at_once(command, hook, signum, capsys):
    options = ["--model", "LitEstimator", "--model.estimator", "Exact", "--model.sigma_max", "2"]
    options += ["--model.sampling_steps", "4", "--data", "Digits", "--data.batch_size", "2", "--data.val_images", "4"]
    options += ["--data.predict_samples", "4", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as stop:
        main([command, *options, *killer(step=0, hook=hook, signum=int(signum))])
    assert stop.value.code == 128 + signum
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
    assert start_of("knn_1") == str(last(0))
    content = bytearray(last(1).read_bytes())
    content[len(content) // 2] ^= 4
    last(1).write_bytes(content)
    with pytest.warns(UserWarning, match=r"knn_1.* is damaged: .*an older checkpoint is used"):
        fit(4, "--ckpt_path", "last", "--trainer.logger.version", "knn_2")
    assert start_of("knn_2") == str(last(0))
    assert "is damaged: the checksum" in refused(capsys, "fit", "--ckpt_path", last(1))
    checkpoint = torch.load(last(2), weights_only=True)
    del checkpoint["optimizer_states"]
    torch.save(checkpoint, last(2))
    assert "cannot be resumed from: the checkpoint has no opt" in refused(capsys, "fit", "--ckpt_path", last(2))
    with pytest.warns(UserWarning, match=r"knn_2.* has no optimizer_states; an older checkpoint is used"):
        fit(4, "--ckpt_path", "last")
    assert "it is refused" in refused(capsys, "predict", "--ckpt_path", last(), "--weights_only", "false")


@pytest.mark.parametrize("logger", [True, {"name": "own"}, {"name": None}, {"save_dir": "elsewhere"}])
def test_last_is_looked_for_where_the_logger_of_the_options_writes(logger):
    options = {"default_root_dir": "root", "logger": logger}
    if logger is True:
        folder = Path(pl.Trainer(**options, enable_progress_bar=False, accelerator="cpu").log_dir)
    else:
        folder = Path(CSVLogger(**{"save_dir": "root", **logger}).log_dir)
        options["logger"] = [{"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": logger}]
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    assert checkpoints_of_name(options) == [folder / "checkpoints" / "last.ckpt"]


def test_last_is_of_a_run_with_the_same_estimator(capsys):
    Path("own.yaml").write_text("class_path: lit_knn.estimators.SubspaceKNN\ninit_args: {r: 16, n: 8}\n")
    own = ["--model.estimator", "own.yaml"]
    fit(2)
    fit(3, *own)
    for version, options in (("knn_0", []), ("subspace_knn_0", own)):
        fit(4, "--ckpt_path", "last", *options)
        assert start_of(version) == f"runs/demo/{version}/checkpoints/last.ckpt"
    line = refused(capsys, "fit", "--ckpt_path", "last", "--model.estimator", "TopK")
    wanted = "it needs a whole last.ckpt of a run with this name, model, estimator and --seed"
    assert f"found none in runs/demo; {wanted}" in line


def test_a_longer_run_is_not_overwritten(capsys):
    fit(3, "--trainer.logger.version", "7")
    own = Path("runs/demo/version_7/checkpoints/last.ckpt")
    line = refused(capsys, "fit", "--trainer.max_steps", 9, "--trainer.logger.version", 7)
    assert f"{own} has 3 steps, and this run, from step 0, would overwrite it" in line
    line = refused(capsys, "fit", "--trainer.max_steps", 2, "--ckpt_path", own)
    assert line == f"error: --trainer.max_steps 2: {own} has 3 steps already; give more"
    # A run that is done already ends well, and with more steps it goes on in its own folder.
    for steps in (3, 4):
        fit(steps, "--trainer.logger.version", "7", "--ckpt_path", str(own))
        assert f"Checkpoint:   {own}" in capsys.readouterr().out
        assert torch.load(own, weights_only=True)["global_step"] == steps
    own.write_bytes(b"damaged")
    assert "this run would overwrite a checkpoint: " in refused(capsys, "fit", "--trainer.logger.version", 7)


def test_folders_that_cannot_be_written_end_in_one_line(capsys):
    Path("taken").write_text("a file")
    for folder, said in (("taken", "taken"), ("n" * 300, "File name too long"), ("/proc/none", "/proc/none")):
        assert said in refused(capsys, "fit", "--trainer.logger.save_dir", folder)
