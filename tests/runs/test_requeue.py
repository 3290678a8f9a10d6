"""A job that SLURM queues again goes on where it stopped, and says which options have changed since."""

import os
import shlex
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml

from lit_knn.commands.trainer import Trainer
from lit_knn.data import Digits
from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM, LitFlow, LitMeanFlow
from lit_knn.nets import UNet
from lit_knn.runs.changes import changes, data_changes, described
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.harmless import harmful
from lit_knn.runs.record import read_record
from lit_knn.runs.starting import newest_of_job
from main import main
from tests.command_lines import DEMO, TINY, refusal_of
from tests.interrupted_runs import QUIET, assert_same, killed

SMALL = ["-c", DEMO, *TINY, "--model.net.channels", "4", "--model.net.multipliers", "[1]"]
SMALL += [
    "--data.batch_size",
    "16",
    "--trainer.limit_val_batches",
    "0",
    "--trainer.callbacks",
    "[]",
]
RUNS = Path("runs/demo")
LAST = RUNS / "knn_0" / "checkpoints" / "last.ckpt"
WATCH = ["--trainer.callbacks+", "LearningRateMonitor"]
# What makes a model class-conditional, with guidance.
OF_CLASSES = [
    "--model.net.num_classes",
    "10",
    "--model.class_conditional",
    "true",
    "--model.label_dropout",
    "0.1",
]

pytestmark = pytest.mark.usefixtures("own_folder")


def enter_job(monkeypatch, number, restarts=0):
    names = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "NTASKS": "1", "JOB_NAME": "a"}
    names |= {"JOB_ID": str(number), "RESTART_COUNT": str(restarts)}
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def train(monkeypatch, steps, *args, config=DEMO):
    command = ["fit", "-c", config, *SMALL[2:], "--trainer.max_steps", str(steps), *map(str, args)]
    monkeypatch.setattr(sys, "argv", ["lit-knn", *command])
    main(command)


@pytest.fixture
def job(monkeypatch):
    """`job(77)` makes this process one of a SLURM job."""
    return partial(enter_job, monkeypatch)


@pytest.fixture
def fit(monkeypatch):
    """`fit(6, *args)` trains up to a step, with these arguments as the command line of the process."""
    return partial(train, monkeypatch)


@pytest.fixture(scope="module")
def job_77(tmp_path_factory):
    """A folder with an uninterrupted run of six steps, and one of job 77 that SIGTERM ended after three."""
    folder = tmp_path_factory.mktemp("job_77")
    kills = killed("KilledAt", step=2, hook="on_after_backward", signum=int(signal.SIGTERM))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(patch, 6, "--trainer.logger.name", "whole")
        enter_job(patch, 77)
        Path("killed.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [kills]}}))
        with pytest.raises(SystemExit) as stop:
            train(patch, 6, "-c", "killed.yaml")
        assert stop.value.code == 143
    # What sent the signal is no part of the run.
    config = folder / RUNS / "knn_0" / "config.yaml"
    options = yaml.safe_load(config.read_text())
    options["trainer"]["callbacks"] = []
    config.write_text(yaml.safe_dump(options))
    return folder


@pytest.fixture
def stopped(job_77, own_folder, job):
    """Copies both runs into the current folder, and makes this process one of job 77."""
    shutil.copytree(job_77, ".", dirs_exist_ok=True)
    job(77)


def runs():
    return sorted(path.name for path in RUNS.iterdir())


def steps_of(version):
    return read_record(RUNS / version).step


def told_of_job(warned):
    return [str(each.message) for each in warned if "this job" in str(each.message)]


@pytest.mark.usefixtures("stopped")
def test_a_requeued_job_is_the_uninterrupted_run(fit, recwarn):
    assert steps_of("knn_0") == 3
    # The same values in other words.
    fit(6, "--model.lr", "3.0e-3", "--trainer.precision", "32", *WATCH)
    assert runs() == ["knn_0"]
    assert_same(LAST, Path("runs/whole/knn_0/checkpoints/last.ckpt"))
    assert told_of_job(recwarn) == []


@pytest.mark.usefixtures("stopped")
def test_a_requeued_job_goes_on_with_other_harmless_options(fit):
    options = [
        "--trainer.val_check_interval",
        "2",
        "--trainer.log_every_n_steps",
        "1",
        "--data.val_images",
        "8",
    ]
    with pytest.warns(UserWarning, match="this job") as warned:
        fit(7, *options, "--last_checkpoint.every_n_steps", "1")
    assert runs() == ["knn_0"]
    assert steps_of("knn_0") == 7
    (line,) = told_of_job(warned)
    assert line.startswith(
        "this job goes on in runs/demo/knn_0 with changed options: --data.val_images 32, now 8; --"
    )
    assert line.endswith("and 2 more")


@pytest.mark.parametrize(
    ("options", "said", "kept"),
    [
        (
            ["--model.lr", "0.1", "--trainer.val_check_interval", "9"],
            "--model.lr 0.003, now 0.1",
            "",
        ),
        # A checkpoint of another seed is refused.
        (["--seed_everything", "5"], "--seed_everything 0, now 5", "--seed_everything 0 "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("stopped")
def test_another_run_of_a_job_starts_anew_and_says_why(options, said, kept, fit):
    with pytest.warns(UserWarning, match="this job") as warned:
        fit(1, *options)
    (line,) = told_of_job(warned)
    assert line.startswith(
        f"this job has an earlier part in runs/demo/knn_0 with other options: {said}; this run"
    )
    assert line.endswith(
        f"; this run starts anew, and {kept}--ckpt_path {LAST} would go on from there"
    )
    assert runs() == ["knn_0", "knn_1"]
    assert (steps_of("knn_0"), steps_of("knn_1")) == (3, 1)


@pytest.mark.usefixtures("stopped")
def test_of_two_earlier_parts_the_nearest_one_is_named(fit):
    newer = shutil.copytree(RUNS / "knn_0", RUNS / "knn_1")
    options = yaml.safe_load((newer / "config.yaml").read_text())
    options["data"]["init_args"]["batch_size"] = 8
    (newer / "config.yaml").write_text(yaml.safe_dump(options))
    os.utime(newer / "slurm_77")
    with pytest.warns(
        UserWarning,
        match=r"part in runs/demo/knn_0 with other options: --model\.lr 0\.003, now 0\.1;",
    ):
        fit(1, "--model.lr", "0.1")
    assert runs() == ["knn_0", "knn_1", "knn_2"]


def test_a_job_repeats_a_finished_run_unless_queued_again(job, fit):
    job(77)
    for version in ("knn_0", "knn_1"):  # The same command twice in one job.
        fit(1)
        assert runs()[-1] == version
    times = [path.stat().st_mtime_ns for path in RUNS.glob("*/checkpoints/last.ckpt")]
    job(77, restarts=1)
    fit(1)
    assert runs() == ["knn_0", "knn_1"]
    assert [path.stat().st_mtime_ns for path in RUNS.glob("*/checkpoints/last.ckpt")] == times
    # A longer training is another one of the job, because the first is done.
    fit(2)
    assert runs() == ["knn_0", "knn_1", "knn_2"]


@pytest.mark.usefixtures("stopped")
def test_the_same_command_goes_on_and_names_changed_options(fit, monkeypatch):
    record = read_record(RUNS / "knn_0")
    record.command = shlex.join(
        ["lit-knn", "fit", *SMALL, "--trainer.max_steps", "6", "-c", "own.yaml"]
    )
    record.write(RUNS / "knn_0")
    Path("own.yaml").write_text("model: {init_args: {lr: 0.01}}\n")
    with pytest.warns(
        UserWarning,
        match=r"goes on in runs/demo/knn_0 with changed options: --model\.lr 0\.003, now",
    ):
        fit(6, "-c", "own.yaml")
    assert steps_of("knn_0") == 6


@pytest.mark.filterwarnings("ignore:.*it is left out")
@pytest.mark.usefixtures("stopped")
def test_the_newest_whole_checkpoint_of_a_job_counts(fit):
    run = RunFolder(RUNS / "knn_0")
    signalled = run.path / "slurm_77" / "hpc_ckpt_1.ckpt"
    shutil.copy(LAST, signalled)
    for time, newest in ((1, LAST), (None, signalled)):
        os.utime(signalled, time and (time, time))
        assert newest_of_job(run)[0] == newest
    LAST.write_bytes(b"damaged")
    assert newest_of_job(run)[0] == signalled
    fit(6)
    assert runs() == ["knn_0"]
    assert steps_of("knn_0") == 6
    LAST.unlink()
    signalled.unlink()
    fit(1)  # There is nothing left to go on from.
    assert runs() == ["knn_0", "knn_1"]


@pytest.mark.parametrize(("kind", "goes_on"), [("flow", True), ("meanflow", False)])
def test_guidance_may_change_for_samples_not_for_training(kind, goes_on, job, fit):
    job(77)
    fit(1, *OF_CLASSES, config=f"{kind}/digits")
    folder = Path("runs", f"{kind}_digits")
    record = read_record(folder / "knn_0")
    record.status = "interrupted"
    record.write(folder / "knn_0")

    with pytest.warns(UserWarning, match=r"this job .*--model\.guidance 1\.0, now 2\.0"):
        fit(2, *OF_CLASSES, "--model.guidance", "2", config=f"{kind}/digits")
    assert len([*folder.iterdir()]) == (1 if goes_on else 2)


@pytest.mark.parametrize("kind", [LitEDM, LitFlow, LitMeanFlow])
def test_options_that_a_job_may_change_change_no_step(kind):
    def losses(**options):
        torch.manual_seed(0)
        augment_dim = 8 if kind is LitMeanFlow else 0
        net = UNet(
            1, channels=4, multipliers=(1,), blocks=1, num_classes=10, augment_dim=augment_dim
        )
        options = {"class_conditional": True, "label_dropout": 0.5, **options}
        watch = Watch()
        quiet = {"logger": False, "enable_checkpointing": False, "callbacks": [watch], **QUIET}
        Trainer(max_steps=2, limit_val_batches=0, **quiet).fit(
            kind(net, OneSample(), **options), Digits(batch_size=8)
        )
        return watch.losses

    class Watch(pl.Callback):
        def __init__(self):
            self.losses = []

        def on_train_batch_end(self, trainer, pl_module, outputs, *_):
            self.losses.append(float(outputs["loss"]))

    others = {"sampling_steps": 3, "sampling_class": "2", "guidance": 2.0, "measure_target": False}
    same = [name for name, value in others.items() if losses(**{name: value}) == losses()]
    assert same == [name for name in others if name in kind.untrained_options]


# Which options differ


def write_config(**parts):
    return {"trainer": {"devices": 1, "num_nodes": 1}, "model": {}, "data": {}, **parts}


def test_values_in_other_words_are_the_same_values():
    def data(path):
        return write_config(data={"class_path": "lit_knn.data.Arrays", "init_args": {"path": path}})

    np.save("a.npy", np.arange(9))
    np.save("copy.npy", np.arange(9))
    np.save("b.npy", np.arange(9)[::-1])
    Path("folder").mkdir()
    Path("folder", "0.png").write_bytes(b"0")
    shutil.copytree("folder", "folder_2")
    for one, other in (
        ("a.npy", "copy.npy"),
        ("a.npy", "./a.npy"),
        ("moved.npy", "a.npy"),
        ("folder", "folder_2"),
    ):
        assert changes(data(one), data(str(Path(other).absolute()))) == {}
    assert changes(data("a.npy"), data("b.npy")) == {"data.path": ("a.npy", "b.npy")}
    assert changes(data("a.npy"), data("none.npy")) == {"data.path": ("a.npy", "none.npy")}
    Path("folder_2", "1.png").write_bytes(b"1")
    assert list(changes(data("folder"), data("folder_2"))) == ["data.path"]
    # The checkpoint has no hash of a teacher that has moved.
    teachers = [
        write_config(model={"estimator": {"class_path": "N", "init_args": {"path": p}}})
        for p in ("no", "a.npy")
    ]
    assert harmful(changes(*teachers), {}) == ["model.estimator.path"]


def test_the_same_ranks_may_be_on_other_machines():
    def spread(devices, nodes):
        return write_config(trainer={"devices": devices, "num_nodes": nodes})

    assert changes(spread(8, 1), spread(4, 2)) == {}
    assert harmful(changes(spread(8, 1), spread(4, 1)), {}) == ["trainer.devices"]
    assert harmful(changes(spread("auto", 1), spread(4, 1)), {}) == ["trainer.devices"]


def test_of_callbacks_only_those_that_watch_may_change():
    def callbacks(*names):
        return write_config(
            trainer={"callbacks": [{"class_path": name, "init_args": {}} for name in names]}
        )

    watching = ["lit_knn.callbacks.SampleGrid", "lit_knn.callbacks.fidelity.Fidelity"]
    watching += ["pytorch_lightning.callbacks.EarlyStopping"]
    assert changes(callbacks(), callbacks(*watching)) == {}
    for name in (
        "lit_knn.callbacks.PowerAverages",
        "mine.Watch",
        "pytorch_lightning.callbacks.ModelPruning",
    ):
        assert harmful(changes(callbacks(), callbacks(*watching, name)), {}) == [
            "trainer.callbacks.0"
        ]
    single = write_config(trainer={"callbacks": {"class_path": watching[0]}})
    assert changes(single, callbacks()) == {}


def test_a_line_names_at_most_three_options():
    assert described({"a": (1, 2), "b.c": (None, "x")}) == "--a 1, now 2; --b.c None, now x"
    assert described(dict.fromkeys("abcde", (1, 2))).endswith("; and 2 more")


# `--ckpt_path last` and the data


ARRAYS = ["--data", "Arrays", "--data.path", "digits.npy", "--data.batch_size", "16"]


def test_last_is_of_a_run_on_the_same_data(fit, capsys):
    np.save("digits.npy", np.random.default_rng(0).integers(0, 256, (64, 1, 8, 8), dtype=np.uint8))
    np.save("other.npy", np.random.default_rng(1).integers(0, 256, (64, 1, 8, 8), dtype=np.uint8))
    fit(1)
    for version, path in (("on_a", "digits.npy"), ("on_b", "other.npy")):
        fit(1, *ARRAYS, "--data.path", path, "--trainer.logger.version", version)
    few = ["--data.predict_samples", "2", "--ckpt_path", "last", "--sample_writer.folder"]
    for options, version in (
        (ARRAYS, "on_a"),
        ([*ARRAYS, "--data.path", "other.npy"], "on_b"),
        ([], "knn_0"),
    ):
        main(["predict", *SMALL, *options, *few, version])
        told = (RUNS / version / "predict_0" / "config.yaml").read_text()
        assert yaml.safe_load(told)["ckpt_path"] == str(
            RUNS / version / "checkpoints" / "last.ckpt"
        )
    shutil.rmtree(RUNS / "knn_0")
    capsys.readouterr()
    line = refusal_of(["predict", *SMALL, *few, "out"], capsys)
    assert (
        "found none in runs/demo; it needs a whole one of a run with this name, model, estimator and data;"
        in line
    )
    assert (
        "runs/demo/on_b has other data: --data lit_knn.data.Arrays, now lit_knn.data.Digits" in line
    )
    # A command that does not train may choose other images of the data, and serve them in another way.
    options = ["--data.held_out", "8", "--data.batch_size", "4", "--data.train_images", "20"]
    main(["predict", *SMALL, *ARRAYS, *options, *few, "again"])
    shutil.rmtree(RUNS / "on_b")
    capsys.readouterr()
    line = refusal_of(["fit", *SMALL, *ARRAYS, *options, "--ckpt_path", "last"], capsys)
    assert (
        "runs/demo/on_a has other data: --data.held_out 0, now 8; --data.train_images" not in line
    )
    assert line.endswith("runs/demo/on_a has other data: --data.held_out 0, now 8")


def test_latents_that_were_encoded_once_are_the_same_data():
    def latents(**options):
        images = {"class_path": "lit_knn.data.Digits", "init_args": {"batch_size": 256}}
        return write_config(
            data={"class_path": "lit_knn.data.Latents", "init_args": {"images": images, **options}}
        )

    encoded = latents(path="latents.npy")
    assert data_changes(latents(path=None), encoded, trains=True) == {}
    other = latents(autoencoder={"class_path": "PCA", "init_args": {"scale": 0.5}})
    again = latents(autoencoder={"class_path": "PCA", "init_args": {"scale": 0.25}})
    assert list(data_changes(other, again, trains=False)) == ["data.autoencoder.scale"]
