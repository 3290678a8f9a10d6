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
from lit_knn.runs.folder import RunFolder, choose_folder, next_version, version_stem
from lit_knn.runs.record import read_record
from main import main
from tests import ROOT

SMALL = ["-c", str(ROOT / "configs/demo.yaml"), "-c", "small.yaml"]
STF = str(ROOT / "configs/estimators/stf.yaml")
RUN = Path("runs/demo/knn_0")
LAST = RUN / "checkpoints" / "last.ckpt"
CSV = "pytorch_lightning.loggers.CSVLogger"
TENSORBOARD = "pytorch_lightning.loggers.TensorBoardLogger"
MODEL = {"class_path": "lit_knn.modules.ict.LitICT"}


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_small()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a run of two steps, which is trained once."""
    folder = tmp_path_factory.mktemp("kept")
    with contextlib.chdir(folder):
        write_small()
        fit(2)
    return folder


@pytest.fixture
def trained(kept):
    """Copies that run into the current folder."""
    shutil.copytree(kept, ".", dirs_exist_ok=True)


def write_small():
    callbacks = [
        {"class_path": "lit_knn.callbacks.PixelFrechetDistance", "init_args": {"num_samples": 8}},
        {"class_path": "lit_knn.callbacks.SampleGrid", "init_args": {"num_samples": 4}},
        {"class_path": "lit_knn.callbacks.CheckpointByImages", "init_args": {"every_n_images": 32}},
    ]
    trainer = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    trainer |= {"val_check_interval": 2, "callbacks": callbacks}
    net = {"init_args": {"channels": 4, "multipliers": [1]}}
    model = {"init_args": {"net": net, "estimator": {"init_args": {"n": 4}}}}
    config = {"trainer": trainer, "model": model, "data": {"init_args": {"batch_size": 16, "val_images": 16}}}
    Path("small.yaml").write_text(yaml.safe_dump(config))


def fit(steps, *args):
    main(["fit", *SMALL, "--trainer.max_steps", str(steps), *map(str, args)])


def options(name, *loggers):
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump({"trainer": {"logger": list(loggers) if len(loggers) > 1 else loggers[0]}}))
    return "-c", path


def logger(class_path, **arguments):
    return {"class_path": class_path, "init_args": arguments}


def parts(run):
    """Check that a run's folder has all that belongs to it."""
    for name in ("config.yaml", "run.json", "fidelity.csv", "samples", "checkpoints/last.ckpt"):
        assert (run / name).exists(), name
    return sorted(path.name for path in run.iterdir())


def steps_of(table, column):
    return [int(row["step"]) for row in read_rows(table) if row.get(column)]


def test_a_resumed_run_goes_on_in_its_folder_and_loses_nothing(capsys):
    fit(4)
    first = (RUN / "config.yaml").read_text()
    record = read_record(RUN)
    fit(6, "--ckpt_path", "last")
    assert [path.name for path in RUN.parent.iterdir()] == ["knn_0"]
    assert torch.load(LAST, weights_only=True)["global_step"] == 6
    events = EventAccumulator(str(RUN))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(6))
    assert steps_of(RUN / "fidelity.csv", "fd_pixels") == [2, 4, 6]
    assert sorted(path.name for path in (RUN / "samples").glob("*1-step.png")) == [
        f"step_000000{step}_1-step.png" for step in (2, 4, 6)
    ]
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
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    fit(3, "--ckpt_path", RUN / "checkpoints" / "images_seen=32.ckpt")
    fit(3, "--ckpt_path", LAST, "--trainer.logger.name", "another")
    fit(3, "--ckpt_path", LAST, "--trainer.logger.version", "own")
    fit(3, "--ckpt_path", LAST, "--model.estimator", STF)
    main(["validate", *SMALL, "--ckpt_path", str(LAST)])
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in RUN.parent.iterdir()) == ["knn_0", "knn_1", "knn_2", "own", "stf_0"]
    assert read_record(Path("runs/another/knn_0")).step == 3
    assert read_record(RUN.parent / "own").resumed_from == str(LAST)
    assert RunFolder(RUN.parent / "own").start() == str(LAST)
    # What has been resumed into another folder goes on there, and still knows where it began.
    fit(4, "--ckpt_path", RUN.parent / "own" / "checkpoints" / "last.ckpt")
    assert read_record(RUN.parent / "own").resumed_from == RunFolder(RUN.parent / "own").start() == str(LAST)
    assert list(RunFolder(RUN.parent / "own").kept_checkpoints()) == [32, 64]


def test_runs_without_a_logger_do_not_share_a_folder():
    for _ in range(2):
        fit(2, "--trainer.logger", "false")
    runs = Path("runs/lightning_logs")
    assert parts(runs / "knn_0") == parts(runs / "knn_1")
    assert steps_of(runs / "knn_0" / "fidelity.csv", "fd_pixels") == [2]
    fit(3, "--trainer.logger", "false", "--ckpt_path", "last")
    assert read_record(runs / "knn_1").step == 3
    assert sorted(path.name for path in Path("runs").iterdir()) == ["lightning_logs"]


def test_no_earlier_configuration_is_replaced(tmp_path):
    for name in ("config.yaml", "config_1.yaml"):  # Someone has deleted config_0.yaml.
        (tmp_path / name).write_text(name)
    run = RunFolder(tmp_path)
    assert run.keep_earlier("config.yaml") == tmp_path / "config_2.yaml"
    assert [path.read_text() for path in run.earlier("config.yaml")] == ["config_1.yaml", "config.yaml"]
    # As text, 10 would be before 2.
    for number in range(3, 12):
        (tmp_path / "config.yaml").write_text(str(number))
        assert run.keep_earlier("config.yaml") == tmp_path / f"config_{number}.yaml"
    assert [path.read_text() for path in run.earlier("config.yaml")][2:] == [str(number) for number in range(3, 12)]


@pytest.mark.parametrize("kind", [TENSORBOARD, CSV])
def test_a_home_is_expanded_once_for_the_logger_and_the_run(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", "place")
    fit(1, *options("home", logger(kind, save_dir="~/$PLACE", name="x")))
    (run,) = (tmp_path / "home" / "place" / "x").iterdir()
    assert {"run.json", "metrics.csv" if kind == CSV else "config.yaml"} <= {path.name for path in run.iterdir()}
    assert not Path("~").exists()


def test_a_dangling_link_as_the_folder_of_runs_is_refused(capsys):
    Path("runs").symlink_to("nowhere")
    with pytest.raises(SystemExit):
        fit(1)
    assert "runs" in capsys.readouterr().err


def test_two_loggers_share_the_folder_and_a_resumed_table_has_all_rows():
    both = options("both", logger(CSV, save_dir="runs", name="two"), logger(TENSORBOARD, save_dir="runs", name="two"))
    fit(2, *both)
    run = Path("runs/two/knn_0")
    assert {"metrics.csv"} < set(parts(run))
    fit(4, *both, "--ckpt_path", "last")
    assert steps_of(run / "metrics_0.csv", "train/loss") == [0, 1]
    assert steps_of(run / "metrics.csv", "train/loss") == [2, 3]
    assert len(list(run.glob("events.out.*"))) == 2
    assert [path.name for path in run.parent.iterdir()] == ["knn_0"]


@pytest.mark.parametrize(
    ("estimator", "stem"),
    [("KNN", "knn"), ("STF", "stf"), ("OneSample", "one_sample"), ("UniformSNIS", "uniform_snis")],
)
def test_a_version_is_named_after_the_estimator(estimator, stem):
    model = {"class_path": "lit_knn.modules.ict.LitICT"}
    named = {"estimator": {"class_path": f"lit_knn.estimators.{estimator}"}}
    assert version_stem({**model, "init_args": named}) == stem
    assert version_stem({**model, "init_args": {"estimator": None}}) == "ict"


def test_the_number_is_above_those_of_the_same_name(tmp_path):
    assert next_version(tmp_path / "none", "stf") == "stf_0"
    for name in ("stf_2", "stf_10", "stf_x", "own_stf_30", "version_40"):
        (tmp_path / name).mkdir()
    assert (next_version(tmp_path, "stf"), next_version(tmp_path, "knn")) == ("stf_11", "knn_0")


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
def test_a_refused_run_leaves_no_folder():
    with pytest.raises(SystemExit):
        fit(1, "-c", STF, "--ckpt_path", LAST)  # The checkpoint has two steps already.
    with pytest.raises(SystemExit):
        fit(1, "--model.net.in_channels", "3")  # The data are found to be grey when the files are there already.
    assert [path.name for path in RUN.parent.iterdir()] == [RUN.name]
    with pytest.raises(SystemExit):
        fit(1, "--model.net.in_channels", "3", "--trainer.logger.name", "other/deep")
    assert [path.name for path in RUN.parent.parent.iterdir()] == [RUN.parent.name]


def test_a_run_that_fails_later_keeps_its_files(monkeypatch):
    monkeypatch.setattr(SampleGrid, "on_validation_epoch_end", lambda *_: 1 / 0)
    with pytest.raises(SystemExit):
        fit(4)
    assert (RUN / "config.yaml").exists()
    assert read_rows(RUN / "fidelity.csv")


@pytest.mark.parametrize("version", ["", "..", "x/y"])
def test_a_version_that_is_no_name_of_a_folder_is_refused(version, tmp_path):
    with pytest.raises(InputError, match=r"trainer\.logger\.version must be the name of a folder"):
        choose_folder({"default_root_dir": str(tmp_path), "logger": logger(CSV, version=version)}, MODEL)


@pytest.mark.parametrize(("version", "folder"), [("mine", "mine"), (7, "version_7")])
def test_a_version_of_ones_own_stays(version, folder, tmp_path):
    options = {"default_root_dir": str(tmp_path), "logger": [logger(TENSORBOARD), logger(CSV, version=version)]}
    assert choose_folder(options, MODEL).path == tmp_path / "lightning_logs" / folder


@pytest.mark.usefixtures("trained")
def test_a_measurement_in_the_folder_of_a_run_leaves_its_configuration():
    kept = (RUN / "config.yaml").read_bytes()
    here = ["--trainer.logger.version", RUN.name, "--ckpt_path", str(LAST)]
    main(["validate", *SMALL, *here])
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
        before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
        with pytest.raises(SystemExit):
            fit(4, "--ckpt_path", "last")
        assert capsys.readouterr().err.startswith(f"error: {RUN}: another process trains in this folder; wait")
        assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before
        other.communicate(b"\n")
    fit(4, "--ckpt_path", "last")
    assert read_record(RUN).step == 4


def test_last_is_of_the_same_seed():
    for seed in (1, 2):
        fit(1, "--seed_everything", seed)
    fit(2, "--seed_everything", 1, "--ckpt_path", "last")
    assert [read_record(RUN.parent / f"knn_{number}").step for number in (0, 1)] == [2, 1]
