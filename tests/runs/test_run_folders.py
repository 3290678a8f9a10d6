"""Each run has one folder, whatever its logger; one that was interrupted or resumed goes on in it and loses nothing."""

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger

from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.folder_choice import choose_folder
from lit_knn.runs.kept_files import kept_checkpoints
from lit_knn.runs.record import read_record
from main import main
from tests.command_lines import DEMO, ROOT, TINY, refusal_of
from tests.interrupted_runs import killed
from tests.trained_runs import events_of

SMALL = [
    "-c",
    DEMO,
    *TINY,
    "--model.net.channels",
    "4",
    "--model.net.multipliers",
    "[1]",
    "--data.batch_size",
    "16",
]
SMALL += ["--trainer.log_every_n_steps", "1", "--trainer.val_check_interval", "2"]
SMALL += ["--trainer.callbacks+", "CheckpointByImages", "--trainer.callbacks.every_n_images", "32"]
# Without measurements.
BARE = ["--trainer.limit_val_batches", "0", "--trainer.callbacks", "[]"]
STF = str(ROOT / "configs/estimators/stf.yaml")
RUN = Path("runs/demo/knn_0")
LAST = RUN / "checkpoints" / "last.ckpt"
CSV = "pytorch_lightning.loggers.CSVLogger"
TENSORBOARD = "pytorch_lightning.loggers.TensorBoardLogger"
MODEL = {"class_path": "lit_knn.modules.ict.LitICT"}


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a run of two steps, which is trained once."""
    folder = tmp_path_factory.mktemp("kept")
    with contextlib.chdir(folder):
        fit(2)
    return folder


@pytest.fixture
def trained(kept, own_folder):
    """Copies that run into the current folder."""
    shutil.copytree(kept, ".", dirs_exist_ok=True)


def fit(steps, *args):
    main(["fit", *SMALL, "--trainer.max_steps", str(steps), *map(str, args)])


def refused(capsys, steps, *args, command="fit"):
    """Run a command that must end in one line and change no file; return the line."""
    before = contents(".")
    capsys.readouterr()
    line = refusal_of([command, *SMALL, "--trainer.max_steps", str(steps), *map(str, args)], capsys)
    assert contents(".") == before
    return line


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}


def last(version):
    return Path("runs/demo", version, "checkpoints", "last.ckpt")


def steps_in(path):
    return torch.load(path, weights_only=True)["global_step"]


def start_of(version):
    """The checkpoint that a run was resumed from, as its configuration tells."""
    return yaml.safe_load(Path("runs/demo", version, "config.yaml").read_text())["ckpt_path"]


def logger(class_path, **arguments):
    return {"class_path": class_path, "init_args": arguments}


def two_loggers(**arguments):
    """Options of a run with a table and with events of TensorBoard."""
    loggers = [logger(kind, **arguments) for kind in (CSV, TENSORBOARD)]
    Path("loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    return "-c", "loggers.yaml"


def killer(**options):
    """Options of a run that a signal ends; it keeps a checkpoint at each second step."""
    kept = {"class_path": "CheckpointByImages", "init_args": {"every_n_images": 32}}
    callbacks = [kept, killed("KilledAt", **options)]
    Path("killed.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    return "-c", "killed.yaml"


def steps_of(table, column):
    return [int(row["step"]) for row in read_rows(table) if row.get(column)]


def test_a_resumed_run_goes_on_in_its_folder_and_loses_nothing(capsys):
    both = two_loggers(save_dir="runs", name="demo")
    fit(4, *both)
    first = (RUN / "config.yaml").read_text()
    record = read_record(RUN)
    fit(6, *both, "--ckpt_path", "last")
    assert names(RUN.parent) == ["knn_0"]
    assert steps_in(LAST) == 6
    assert len(list(RUN.glob("events.out.*"))) == 2
    events, _ = events_of(RUN)
    assert [event.step for event in events.Scalars("train/loss")] == list(range(6))
    assert steps_of(RUN / "metrics_0.csv", "train/loss") == [0, 1, 2, 3]
    assert steps_of(RUN / "metrics.csv", "train/loss") == [4, 5]
    assert steps_of(RUN / "fidelity.csv", "fd_pixels") == [2, 4, 6]
    assert {f"step_000000{step}_1-step.png" for step in (2, 4, 6)} <= set(names(RUN / "samples"))
    # The settings of each part are kept, and the chain of checkpoints does not end in a circle.
    assert [path.read_text() for path in RunFolder(RUN).earlier("config.yaml")] == [first]
    assert start_of("knn_0") == str(LAST)
    assert RunFolder(RUN).start() is None
    assert list(kept_checkpoints(RunFolder(RUN))) == [32, 64, 96]
    now = read_record(RUN)
    assert now.resumed_from is None
    assert (now.step, now.time.images, now.images_seen) == (6, 96, 96)
    assert now.time.seconds > record.time.seconds
    capsys.readouterr()
    main(["report", str(RUN)])
    assert "| steps | 6 |" in capsys.readouterr().out
    # A measurement with the settings of the run gets another folder, and leaves those of the run.
    before = contents(RUN)
    version = ["--trainer.logger.version", RUN.name]
    first_kept = RUN / "checkpoints" / "images_seen=32.ckpt"
    for command in ("validate", "predict"):
        main([command, *SMALL, *both, *version, "--ckpt_path", str(first_kept)])
    assert steps_of(RUN.parent / "knn_1" / "fidelity.csv", "fd_pixels") == [2]
    assert (RUN / "predict_0" / "predictions").is_dir()
    shutil.rmtree(RUN / "predict_0")
    assert contents(RUN) == before
    # A version that no training has is used as it stands.
    main(["validate", *SMALL, *both, *version[:1], "mine", "--ckpt_path", str(LAST)])
    assert steps_of(RUN.parent / "mine" / "fidelity.csv", "fd_pixels") == [6]
    # Once the run is moved, another run has its name, which its configuration still tells.
    moved = RUN.rename(RUN.with_name("moved"))
    shutil.copytree(moved, RUN)
    (RUN / "checkpoints" / "images_seen=32.ckpt").rename(
        RUN / "checkpoints" / "images_seen=16.ckpt"
    )
    assert list(kept_checkpoints(RunFolder(moved))) == [32, 64, 96]
    assert RunFolder(moved).parts() == [moved]


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
    fit(4, "--ckpt_path", last("own"))
    assert read_record(own).resumed_from == RunFolder(own).start() == str(LAST)
    assert list(kept_checkpoints(RunFolder(own))) == [32, 64]


def test_runs_without_a_logger_do_not_share_a_folder(monkeypatch, capsys):
    for _ in range(2):
        fit(2, "--trainer.logger", "false")
    runs = Path("runs/lightning_logs")
    assert {"config.yaml", "run.json", "fidelity.csv", "samples", "checkpoints"} <= set(
        names(runs / "knn_0")
    )
    assert names(runs / "knn_0") == names(runs / "knn_1")
    assert steps_of(runs / "knn_0" / "fidelity.csv", "fd_pixels") == [2]
    fit(3, "--trainer.logger", "false", "--ckpt_path", "last")
    assert read_record(runs / "knn_1").step == 3
    assert names("runs") == ["lightning_logs"]
    # A folder of one's own for checkpoints stays, and so does the wish for none.
    monkeypatch.setenv("PLACE", "mine")
    own = [*BARE, "--trainer.logger", "false", "--last_checkpoint.dirpath", "$PLACE"]
    fit(2, *own)
    assert "would overwrite" in refused(capsys, 1, *own)
    fit(1, *BARE, "--trainer.logger", "false", "--trainer.enable_checkpointing", "false")
    assert names("mine") == ["last.ckpt"]
    assert not list(runs.glob("knn_[23]/checkpoints"))


def test_no_earlier_configuration_is_replaced(tmp_path):
    (tmp_path / "config_1.yaml").write_text("1")  # Someone has deleted config_0.yaml.
    run = RunFolder(tmp_path)
    for number in range(2, 12):
        (tmp_path / "config.yaml").write_text(str(number))
        assert run.keep_earlier("config.yaml") == tmp_path / f"config_{number}.yaml"
    # As text, 10 would be before 2.
    assert [path.read_text() for path in run.earlier("config.yaml")] == [
        str(number) for number in range(1, 12)
    ]


@pytest.mark.parametrize(("given", "folder"), [("~/$PLACE", "home/place"), ("", ".")])
def test_the_loggers_and_the_run_have_one_folder(given, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", "place")
    fit(1, *two_loggers(save_dir=given, name="x"))
    (run,) = (tmp_path / folder / "x").iterdir()
    assert {"run.json", "metrics.csv", "config.yaml"} < set(names(run))
    assert list(run.glob("events.out.*"))
    assert not Path("~").exists()


def test_run_is_named_after_estimator_and_numbered_upwards(tmp_path):
    for name in ("stf_2", "stf_10", "stf_x", "own_stf_30", "version_40"):
        (tmp_path / "lightning_logs" / name).mkdir(parents=True)
    options = {"default_root_dir": str(tmp_path), "logger": True}
    for estimator, folder in {
        "STF": "stf_11",
        "OneSample": "one_sample_0",
        "UniformSNIS": "uniform_snis_0",
    }.items():
        model = {
            **MODEL,
            "init_args": {"estimator": {"class_path": f"lit_knn.estimators.{estimator}"}},
        }
        assert choose_folder(options, model).path == tmp_path / "lightning_logs" / folder
    # Runs that start together get folders of their own.
    start = threading.Barrier(16)

    def choose(_):
        start.wait()
        return choose_folder(options, {**MODEL, "init_args": {"estimator": None}}).path

    with ThreadPoolExecutor(16) as threads:
        chosen = set(threads.map(choose, range(16)))
    assert chosen == {tmp_path / "lightning_logs" / f"ict_{number}" for number in range(16)}


def test_a_run_lies_where_the_logger_of_the_options_writes():
    for own in (
        {"name": "own"},
        {"name": None},
        {"save_dir": "elsewhere"},
        {"version": "mine"},
        {"version": 7},
    ):
        options = {
            "default_root_dir": "root",
            "logger": [logger(TENSORBOARD, **own), logger(CSV, **own)],
        }
        expected = Path(CSVLogger(**{"save_dir": "root", "version": "ict_0", **own}).log_dir)
        assert choose_folder(options, MODEL).path == expected
    for version in ("", ".."):
        options = {
            "default_root_dir": "root",
            "logger": [logger(TENSORBOARD), logger(CSV, version=version)],
        }
        with pytest.raises(
            InputError, match=r"trainer\.logger\.version must be the name of a folder"
        ):
            choose_folder(options, MODEL)


@pytest.mark.usefixtures("trained")
def test_a_refused_run_leaves_no_folder(capsys):
    Path("dangling").symlink_to("nowhere")
    Path("taken").write_text("a file")
    refused(capsys, 1, "-c", STF, "--ckpt_path", LAST)  # The checkpoint has two steps already.
    # The data are grey, which is found when the files are there.
    refused(capsys, 1, "--model.net.in_channels", "3")
    refused(capsys, 1, "--model.net.in_channels", "3", "--trainer.logger.name", "other/deep")
    bad = {
        "taken": "taken",
        "dangling": "dangling",
        "n" * 300: "File name too long",
        "~nobody-here/x": "no such user",
    }
    for folder, said in bad.items():
        assert said in refused(capsys, 1, "--trainer.logger.save_dir", folder)


@pytest.mark.parametrize("options", ["--data.hflip true", "--optimizer SGD --optimizer.lr 3e-3"])
@pytest.mark.usefixtures("trained")
def test_refused_resumption_leaves_settings_and_record(options, capsys):
    before = names(RUN), *((RUN / name).read_bytes() for name in ("config.yaml", "run.json"))
    refusal_of(
        ["fit", *SMALL, "--trainer.max_steps", "4", "--ckpt_path", str(LAST), *options.split()],
        capsys,
    )
    for events in sorted(RUN.glob("events.*"))[1:]:
        events.unlink()
    assert (
        names(RUN),
        *((RUN / name).read_bytes() for name in ("config.yaml", "run.json")),
    ) == before


@pytest.mark.usefixtures("trained")
def test_two_processes_do_not_train_in_one_folder(capsys):
    code = f"import fcntl; lock = open('{RUN}/.lock', 'a'); fcntl.lockf(lock, fcntl.LOCK_EX); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        other.stdout.readline()
        line = refused(capsys, 4, "--ckpt_path", "last")
        assert line.startswith(f"error: {RUN}: another process trains in this folder; wait")
        other.communicate(b"\n")
    fit(4, "--ckpt_path", "last")
    assert read_record(RUN).step == 4


@pytest.mark.usefixtures("trained")
def test_training_that_has_all_its_steps_leaves_no_folder():
    before = contents(RUN)
    fit(2, "--ckpt_path", RUN / "checkpoints" / "images_seen=32.ckpt")
    assert names(RUN.parent) == ["knn_0"]
    assert contents(RUN) == before


# Signals


def test_an_interrupted_command_says_the_command_that_goes_on(capsys):
    spaced = ["--model.net.multipliers", "[1, 1]"]
    # The second command has resumed already, and so says the newer checkpoint alone.
    for step, *resumed in [(2,), (4, "--ckpt_path", str(LAST))]:
        with pytest.raises(SystemExit) as stop:
            fit(
                6,
                *BARE,
                *spaced,
                *resumed,
                *killer(step=step, hook="on_after_backward", signum=int(signal.SIGTERM)),
            )
        assert stop.value.code == 143
        assert LAST.with_name(f"images_seen={16 * step}.ckpt").exists()
        (line,) = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("interrupted")
        ]
        assert line.startswith(
            f"interrupted by SIGTERM after step {step + 1}; to go on: lit-knn fit -c "
        )
        assert line.endswith(f"--ckpt_path {LAST}")
        assert line.count("--ckpt_path") == 1
    main(shlex.split(line)[shlex.split(line).index("lit-knn") + 1 :])
    assert steps_in(LAST) == 6


def test_requeued_slurm_job_goes_on_in_its_folder_alone(tmp_path, monkeypatch):
    slurm = {
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "NTASKS": "1",
        "JOB_NAME": "a",
        "JOB_ID": "77",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\nkill -TERM $PPID\n")  # SLURM ends the job, and starts it again.
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    with pytest.raises(SystemExit) as stop:
        fit(6, *BARE, *killer(step=2, hook="on_after_backward", signum=int(signal.SIGUSR1)))
    assert stop.value.code == 143
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    fit(1, *BARE)
    assert names(RUN.parent) == ["knn_0", "knn_1"]
    assert steps_in(last("knn_1")) == 1
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    said = "earlier part in runs/demo/knn_0 with other options: --seed_everything 0, now 5"
    with pytest.warns(UserWarning, match=said):
        fit(1, *BARE, "--seed_everything", "5")  # Another run of the same script.
    assert names(RUN.parent) == ["knn_0", "knn_1", "knn_2"]
    fit(6, *BARE)
    assert names(RUN.parent) == ["knn_0", "knn_1", "knn_2"]
    assert steps_in(LAST) == 6
    assert read_record(RUN).images_seen == 96
    assert len(RunFolder(RUN).earlier("config.yaml")) == 1
    # Another command of the same script.
    monkeypatch.setattr(sys, "argv", ["lit-knn", "fit", "--model.lr=0.1"])
    fit(1, *BARE, "--model.lr", "0.1")
    assert names(RUN.parent) == ["knn_0", "knn_1", "knn_2", "knn_3"]


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
    options += [
        "--model.sampling_steps",
        "4",
        "--data",
        "Digits",
        "--data.batch_size",
        "2",
        "--data.val_images",
        "4",
    ]
    options += [
        "--data.predict_samples",
        "4",
        "--trainer.accelerator",
        "cpu",
        "--trainer.logger",
        "false",
    ]
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


# `--ckpt_path last`, and what would be lost


@pytest.mark.filterwarnings("ignore:.*it is left out")
def test_last_is_the_newest_whole_checkpoint_of_the_name(capsys):
    assert "--ckpt_path last: found none in runs/demo; it needs" in refused(
        capsys, 1, "--ckpt_path", "last"
    )
    for number, name in enumerate(("knn_9", "knn_10", "knn_8")):
        fit(
            2 + number,
            *BARE,
            *(["--ckpt_path", "last"] if number else []),
            "--trainer.logger.version",
            name,
        )
    fit(1, *BARE, "--trainer.logger.name", "another")
    fit(1, *BARE, "--trainer.fast_dev_run", "true")
    assert len(list(Path().rglob("last.ckpt"))) == 4  # The trial leaves none.
    assert (start_of("knn_10"), start_of("knn_8")) == (str(last("knn_9")), str(last("knn_10")))
    content = bytearray(last("knn_8").read_bytes())
    content[len(content) // 2] ^= 4
    last("knn_8").write_bytes(content)
    assert "is damaged: the checksum" in refused(capsys, 5, "--ckpt_path", last("knn_8"))
    checkpoint = torch.load(last("knn_10"), weights_only=True)
    del checkpoint["optimizer_states"]
    torch.save(checkpoint, last("knn_10"))
    assert "cannot be resumed from: the checkpoint has no opt" in refused(
        capsys, 5, "--ckpt_path", last("knn_10")
    )
    fit(5, *BARE, "--ckpt_path", "last", "--trainer.logger.version", "on")
    assert start_of("on") == str(last("knn_9"))


def test_last_is_of_a_run_with_the_same_estimator_and_seed(capsys, caplog):
    Path("own.yaml").write_text(
        "class_path: lit_knn.estimators.SubspaceKNN\ninit_args: {r: 16, n: 8}\n"
    )
    runs = {"knn_0": [], "subspace_knn_0": ["--model.estimator", "own.yaml"]}
    runs |= {"knn_1": ["--model.estimator.n", "4"], "knn_2": ["--seed_everything", "1"]}
    for options in runs.values():
        fit(1, *BARE, *options)
    for version, options in runs.items():
        fit(2, *BARE, "--ckpt_path", "last", *options)
        assert start_of(version) == str(last(version))
    line = refused(capsys, 2, "--ckpt_path", "last", "--model.estimator", "Exact")
    wanted = "it needs a whole one of a run with this name, model, estimator, data and --seed"
    assert f"found none in runs/demo; {wanted}" in line
    assert line.endswith("; runs/demo/knn_2 has another --model.estimator")
    # A newer run is named that the command would take but for one option.
    fit(3, *BARE, "--ckpt_path", "last", "--model.estimator", "own.yaml")
    newest = "runs/demo/knn_2 has another --model.estimator"
    assert f"--ckpt_path last: {last('subspace_knn_0')}; {newest}" in caplog.text
    options = ["--model.class_conditional", "true", "--model.net.num_classes", "10"]
    options += ["--model.estimator", "own.yaml"]
    line = refused(capsys, 3, "--ckpt_path", "last", *options)
    assert "found none in runs/demo" in line
    assert line.endswith("; runs/demo/subspace_knn_0 has another --model.class_conditional")
    options = ["--model.estimator", "own.yaml", "--seed_everything", "9"]
    line = refused(capsys, 3, "--ckpt_path", "last", *options)
    assert line.endswith("; runs/demo/subspace_knn_0 has another --seed_everything")


def test_two_runs_do_not_keep_checkpoints_in_one_folder(capsys):
    own = ["--trainer.limit_val_batches", "0", "--trainer.callbacks.dirpath", "kept"]
    fit(2, *own)
    assert "kept has checkpoints of another training" in refused(capsys, 2, *own)


def test_a_longer_run_is_not_overwritten(capsys):
    fit(3, *BARE, "--trainer.logger.version", "7")
    own = last("version_7")
    line = refused(capsys, 9, "--trainer.logger.version", 7)
    assert f"{own} has 3 steps, and this run, from step 0, would overwrite it" in line
    line = refused(capsys, 2, "--ckpt_path", own)
    assert line == f"error: --trainer.max_steps 2: {own} has 3 steps already; give more"
    # A run that is done already ends well, and with more steps it goes on in its own folder.
    for steps in (3, 4):
        fit(steps, *BARE, "--trainer.logger.version", "7", "--ckpt_path", str(own))
        assert f"Checkpoint:   {own}" in capsys.readouterr().out
        assert steps_in(own) == steps
    own.write_bytes(b"damaged")
    assert "this run would overwrite a checkpoint: " in refused(
        capsys, 9, "--trainer.logger.version", 7
    )
