"""Each run has one folder, whatever its logger, and a resumed run goes on in it."""

import contextlib
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_knn.callbacks import SampleGrid
from lit_knn.commands.report import main as report
from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.runs.folder import RunFolder, choose_folder
from lit_knn.runs.record import read_record
from main import main
from tests.command_lines import DEMO, ROOT, TINY

SMALL = ["-c", DEMO, *TINY, "--model.net.channels", "4", "--model.net.multipliers", "[1]", "--data.batch_size", "16"]
SMALL += ["--trainer.log_every_n_steps", "1", "--trainer.val_check_interval", "2"]
SMALL += ["--trainer.callbacks+", "CheckpointByImages", "--trainer.callbacks.every_n_images", "32"]
STF = str(ROOT / "configs/estimators/stf.yaml")
RUN = Path("runs/demo/knn_0")
LAST = RUN / "checkpoints" / "last.ckpt"
CSV = "pytorch_lightning.loggers.CSVLogger"
TENSORBOARD = "pytorch_lightning.loggers.TensorBoardLogger"
MODEL = {"class_path": "lit_knn.modules.ict.LitICT"}


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a run of two steps, which is trained once."""
    folder = tmp_path_factory.mktemp("kept")
    with contextlib.chdir(folder):
        fit(2)
    return folder


@pytest.fixture
def trained(kept):
    """Copies that run into the current folder."""
    shutil.copytree(kept, ".", dirs_exist_ok=True)


def refused(steps, *args):
    with pytest.raises(SystemExit):
        fit(steps, *args)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def fit(steps, *args):
    main(["fit", *SMALL, "--trainer.max_steps", str(steps), *map(str, args)])


def logger(class_path, **arguments):
    return {"class_path": class_path, "init_args": arguments}


def two_loggers(**arguments):
    """Options of a run with a table and with events of TensorBoard."""
    loggers = [logger(kind, **arguments) for kind in (CSV, TENSORBOARD)]
    Path("loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    return "-c", "loggers.yaml"


def steps_of(table, column):
    return [int(row["step"]) for row in read_rows(table) if row.get(column)]


def test_a_resumed_run_goes_on_in_its_folder_and_loses_nothing(capsys):
    both = two_loggers(save_dir="runs", name="demo")
    fit(4, *both)
    first = (RUN / "config.yaml").read_text()
    record = read_record(RUN)
    fit(6, *both, "--ckpt_path", "last")
    assert names(RUN.parent) == ["knn_0"]
    assert torch.load(LAST, weights_only=True)["global_step"] == 6
    assert len(list(RUN.glob("events.out.*"))) == 2
    events = EventAccumulator(str(RUN))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(6))
    assert steps_of(RUN / "metrics_0.csv", "train/loss") == [0, 1, 2, 3]
    assert steps_of(RUN / "metrics.csv", "train/loss") == [4, 5]
    assert steps_of(RUN / "fidelity.csv", "fd_pixels") == [2, 4, 6]
    assert {f"step_000000{step}_1-step.png" for step in (2, 4, 6)} <= set(names(RUN / "samples"))
    # The settings of each part are kept, and the chain of checkpoints does not end in a circle.
    assert [path.read_text() for path in RunFolder(RUN).earlier("config.yaml")] == [first]
    assert yaml.safe_load((RUN / "config.yaml").read_text())["ckpt_path"] == str(LAST)
    assert RunFolder(RUN).start() is None
    assert list(RunFolder(RUN).kept_checkpoints()) == [32, 64, 96]
    now = read_record(RUN)
    assert now.resumed_from is None
    assert (now.step, now.time.images, now.images_seen) == (6, 96, 96)
    assert now.time.seconds > record.time.seconds
    (part,) = now.earlier
    assert (part["step"], part["status"], part["started"]) == (4, "finished", record.started)
    capsys.readouterr()
    report([str(RUN)])
    assert "| steps | 6 |" in capsys.readouterr().out


@pytest.mark.usefixtures("trained")
def test_what_is_no_continuation_gets_a_folder_of_its_own():
    before = contents(RUN)
    fit(3, "--ckpt_path", RUN / "checkpoints" / "images_seen=32.ckpt")
    fit(3, "--ckpt_path", LAST, "--trainer.logger.name", "another")
    fit(3, "--ckpt_path", LAST, "--trainer.logger.version", "own")
    fit(3, "--ckpt_path", LAST, "--model.estimator", STF)
    main(["validate", *SMALL, "--ckpt_path", str(LAST)])
    assert contents(RUN) == before
    assert names(RUN.parent) == ["knn_0", "knn_1", "knn_2", "own", "stf_0"]
    assert read_record(Path("runs/another/knn_0")).step == 3
    own = RUN.parent / "own"
    assert read_record(own).resumed_from == RunFolder(own).start() == str(LAST)
    # What has been resumed into another folder goes on there, and still knows where it began.
    fit(4, "--ckpt_path", own / "checkpoints" / "last.ckpt")
    assert read_record(own).resumed_from == RunFolder(own).start() == str(LAST)
    assert list(RunFolder(own).kept_checkpoints()) == [32, 64]


def test_runs_without_a_logger_do_not_share_a_folder():
    for _ in range(2):
        fit(2, "--trainer.logger", "false")
    runs = Path("runs/lightning_logs")
    assert {"config.yaml", "run.json", "fidelity.csv", "samples", "checkpoints"} <= set(names(runs / "knn_0"))
    assert names(runs / "knn_0") == names(runs / "knn_1")
    assert steps_of(runs / "knn_0" / "fidelity.csv", "fd_pixels") == [2]
    fit(3, "--trainer.logger", "false", "--ckpt_path", "last")
    assert read_record(runs / "knn_1").step == 3
    assert names("runs") == ["lightning_logs"]


def test_no_earlier_configuration_is_replaced(tmp_path):
    (tmp_path / "config_1.yaml").write_text("1")  # Someone has deleted config_0.yaml.
    run = RunFolder(tmp_path)
    for number in range(2, 12):
        (tmp_path / "config.yaml").write_text(str(number))
        assert run.keep_earlier("config.yaml") == tmp_path / f"config_{number}.yaml"
    # As text, 10 would be before 2.
    assert [path.read_text() for path in run.earlier("config.yaml")] == [str(number) for number in range(1, 12)]


def test_a_home_is_expanded_once_for_the_loggers_and_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", "place")
    fit(1, *two_loggers(save_dir="~/$PLACE", name="x"))
    (run,) = (tmp_path / "home" / "place" / "x").iterdir()
    assert {"run.json", "metrics.csv", "config.yaml"} < set(names(run))
    assert list(run.glob("events.out.*"))
    assert not Path("~").exists()


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ({"estimator": {"class_path": "lit_knn.estimators.STF"}}, "stf_11"),
        ({"estimator": {"class_path": "lit_knn.estimators.OneSample"}}, "one_sample_0"),
        ({"estimator": {"class_path": "lit_knn.estimators.UniformSNIS"}}, "uniform_snis_0"),
        ({"estimator": None}, "ict_0"),
    ],
)
def test_a_run_is_named_after_its_estimator_and_numbered_above_those_of_the_name(model, folder, tmp_path):
    for name in ("stf_2", "stf_10", "stf_x", "own_stf_30", "version_40"):
        (tmp_path / "lightning_logs" / name).mkdir(parents=True)
    options = {"default_root_dir": str(tmp_path), "logger": True}
    assert choose_folder(options, {**MODEL, "init_args": model}).path == tmp_path / "lightning_logs" / folder


@pytest.mark.parametrize(("version", "folder"), [("mine", "mine"), (7, "version_7"), ("", None), ("..", None)])
def test_a_version_of_ones_own_stays_if_it_is_the_name_of_a_folder(version, folder, tmp_path):
    options = {"default_root_dir": str(tmp_path), "logger": [logger(TENSORBOARD), logger(CSV, version=version)]}
    if folder is None:
        with pytest.raises(InputError, match=r"trainer\.logger\.version must be the name of a folder"):
            choose_folder(options, MODEL)
    else:
        assert choose_folder(options, MODEL).path == tmp_path / "lightning_logs" / folder


def test_runs_that_start_together_get_folders_of_their_own(tmp_path):
    options = {"default_root_dir": str(tmp_path), "logger": True}
    start = threading.Barrier(16)

    def choose(_):
        start.wait()
        return choose_folder(options, MODEL).path

    with ThreadPoolExecutor(16) as threads:
        chosen = set(threads.map(choose, range(16)))
    assert chosen == {tmp_path / "lightning_logs" / f"ict_{number}" for number in range(16)}


@pytest.mark.usefixtures("trained")
def test_a_refused_run_leaves_no_folder(capsys):
    refused(1, "-c", STF, "--ckpt_path", LAST)  # The checkpoint has two steps already.
    refused(1, "--model.net.in_channels", "3")  # The data are found to be grey when the files are there already.
    refused(1, "--model.net.in_channels", "3", "--trainer.logger.name", "other/deep")
    assert (names(RUN.parent), names("runs")) == (["knn_0"], ["demo"])
    Path("dangling").symlink_to("nowhere")
    refused(1, "--trainer.logger.save_dir", "dangling")
    assert "dangling" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_fails_later_keeps_its_files(monkeypatch):
    monkeypatch.setattr(SampleGrid, "on_validation_epoch_end", lambda *_: 1 / 0)
    refused(4)
    assert (RUN / "config.yaml").exists()
    assert read_rows(RUN / "fidelity.csv")


@pytest.mark.usefixtures("trained")
def test_a_measurement_in_the_folder_of_a_run_leaves_its_configuration():
    kept = (RUN / "config.yaml").read_bytes()
    main(["validate", *SMALL, "--trainer.logger.version", RUN.name, "--ckpt_path", str(LAST)])
    assert (RUN / "config.yaml").read_bytes() == kept
    assert yaml.safe_load((RUN / "config_validate.yaml").read_text())["ckpt_path"] == str(LAST)
    assert RunFolder(RUN).earlier("config.yaml") == []
    assert RunFolder(RUN).start() is None


@pytest.mark.usefixtures("trained")
def test_two_processes_do_not_train_in_one_folder(capsys):
    code = f"import fcntl; lock = open('{RUN}/.lock', 'a'); fcntl.lockf(lock, fcntl.LOCK_EX); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        other.stdout.readline()
        before = contents("runs")
        refused(4, "--ckpt_path", "last")
        assert capsys.readouterr().err.startswith(f"error: {RUN}: another process trains in this folder; wait")
        assert contents("runs") == before
        other.communicate(b"\n")
    fit(4, "--ckpt_path", "last")
    assert read_record(RUN).step == 4


def test_last_is_of_the_same_seed():
    for seed in (1, 2):
        fit(1, "--seed_everything", seed)
    fit(2, "--seed_everything", 1, "--ckpt_path", "last")
    assert [read_record(RUN.parent / f"knn_{number}").step for number in (0, 1)] == [2, 1]
