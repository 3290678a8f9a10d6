"""Training time excludes validations and adds up resumed parts; the table compares several runs."""

import json
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml

from callbacks import LastCheckpoint, RunSummary
from lit_knn.data import Digits
from lit_knn.estimators import OneSample
from lit_knn.ict import LitICT
from lit_knn.nets import UNet
from lit_knn.schedules import NoiseGrid
from lit_knn.solvers import euler_step
from lit_knn.training import monitor
from lit_knn.training.monitor import TrainingMonitor
from lit_knn.training.time_table import main
from lit_knn.training.times import TrainingTime, hardware_name

STEP, ESTIMATE, VALIDATION = 10.0, 3.0, 1000.0


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self):
        self.now = 5.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(monitor.time, "perf_counter", clock)
    return clock


class SlowEstimator(OneSample):
    def __init__(self, clock):
        self.clock = clock

    def __deepcopy__(self, memo):
        return self

    def posterior_mean(self, *args, **kwargs):
        self.clock.now += ESTIMATE
        return super().posterior_mean(*args, **kwargs)


class SlowRun(pl.Callback):
    """Moves the clock in setup, each step and each validation; can stop the run in a step."""

    def __init__(self, clock, interrupt_at=None):
        self.clock = clock
        self.interrupt_at = interrupt_at

    def setup(self, *args, **kwargs):
        self.clock.now += VALIDATION

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.interrupt_at:
            raise KeyboardInterrupt
        self.clock.now += STEP

    def on_validation_batch_end(self, *_):
        self.clock.now += VALIDATION


def train(folder, clock, steps, ckpt_path=None, interrupt_at=None, **options):
    model = LitICT(UNet(1, channels=4, multipliers=(1,), blocks=1), SlowEstimator(clock), solver=euler_step)
    callbacks = [SlowRun(clock, interrupt_at), LastCheckpoint(dirpath=str(folder)), RunSummary()]
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=1, val_check_interval=2, check_val_every_n_epoch=None,
        log_every_n_steps=3, callbacks=callbacks, **options,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    try:
        trainer.fit(model, Digits(batch_size=64, val_images=8), ckpt_path=ckpt_path)
    except (KeyboardInterrupt, SystemExit):
        assert interrupt_at is not None
    return json.loads((folder / "training_time.json").read_text())


def test_validations_and_setup_do_not_count_and_estimates_do(tmp_path, clock):
    record = train(tmp_path / "a", clock, 5)
    assert record["seconds"] == 5 * (STEP + ESTIMATE)
    assert record["estimator_seconds"] == 5 * ESTIMATE
    assert record["images"] == record["images_seen"] == 5 * 64
    assert record["step"] == 5
    assert record["hardware"] == [hardware_name(torch.device("cpu"), 1)]


def test_parts_of_a_resumed_run_add_up(tmp_path, clock):
    first = train(tmp_path / "a", clock, 3)
    resumed = train(tmp_path / "b", clock, 7, ckpt_path=tmp_path / "a" / "last.ckpt")
    assert first["seconds"] == 3 * (STEP + ESTIMATE)
    assert resumed["seconds"] == 7 * (STEP + ESTIMATE)
    assert resumed["estimator_seconds"] == 7 * ESTIMATE
    assert resumed["images"] == resumed["images_seen"] == 7 * 64
    # The hardware is named once, whatever the number of parts.
    assert resumed["hardware"] == first["hardware"]


def test_an_interrupted_run_leaves_its_time(tmp_path, clock):
    record = train(tmp_path / "a", clock, 9, interrupt_at=4)
    assert record["seconds"] == 4 * (STEP + ESTIMATE)
    assert (record["images"], record["step"]) == (4 * 64, 4)
    again = train(tmp_path / "b", clock, 9, ckpt_path=tmp_path / "a" / "last.ckpt")
    assert again["seconds"] == 9 * (STEP + ESTIMATE)


def test_a_checkpoint_without_a_record_counts_from_there(tmp_path, clock):
    train(tmp_path / "a", clock, 2)
    checkpoint = torch.load(tmp_path / "a" / "last.ckpt", weights_only=False)
    del checkpoint["training_time"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    record = train(tmp_path / "b", clock, 5, ckpt_path=tmp_path / "old.ckpt")
    assert record["seconds"] == 3 * (STEP + ESTIMATE)
    assert (record["images"], record["images_seen"]) == (3 * 64, 5 * 64)


def test_reading_in_between_changes_nothing(clock):
    device = torch.device("cpu")
    monitor = TrainingMonitor(NoiseGrid(), device)
    clock.now += 7
    monitor.restart()
    for _ in range(3):
        with monitor.estimator_watch.measure():
            clock.now += 1
        clock.now += 4
        monitor.update(torch.ones(2), torch.ones(2, dtype=torch.float64), 2)
        monitor.elapsed()
    assert monitor.elapsed() == TrainingTime(15, 6, 3)
    averages = monitor.read()
    assert averages["time/images_per_s"] == pytest.approx(6 / 15)
    assert averages["time/estimator_share"] == pytest.approx(3 / 15)
    monitor.pause()
    clock.now += 100
    assert monitor.elapsed() == TrainingTime(15, 6, 3)


def leave_run(folder, estimator, seconds, images=1000, estimator_seconds=0.0, images_seen=None, **options):
    folder.mkdir()
    config = {"class_path": f"lit_knn.estimators.{estimator}", "init_args": options}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"estimator": config}}}))
    record = {"seconds": seconds, "images": images, "estimator_seconds": estimator_seconds, "hardware": ["8 x A100"]}
    record |= {"images_seen": images if images_seen is None else images_seen, "step": 9}
    (folder / "training_time.json").write_text(json.dumps(record))
    return str(folder)


def rows(printed):
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_the_paper(tmp_path, capsys):
    # Hours of tab:consistency_runtime, with its percentages.
    paths = [
        leave_run(tmp_path / "knn", "KNN", 220.5 * 3600, 409_600_000, 30 * 3600, k=2048, n=256),
        leave_run(tmp_path / "ict", "OneSample", 188.9 * 3600, 409_600_000),
        leave_run(tmp_path / "stf", "STF", 185.8 * 3600, 409_600_000, n=256),
    ]
    main(paths)
    printed = capsys.readouterr().out
    knn, ict, stf = rows(printed)
    assert knn[:3] == [paths[0], "KNN k=2048, n=256", "220"]
    assert (ict[1], ict[6], stf[1]) == ("OneSample", "100.0%", "STF n=256")
    assert (knn[6], stf[6]) == ("116.7%", "98.4%")
    assert knn[3:6] == ["409,600,000", "516", "13.6%"]
    assert knn[7] == "8 x A100"
    assert f"relative to {paths[1]} (OneSample)" in printed
    main([*paths, "--baseline", paths[0]])
    assert rows(capsys.readouterr().out)[0][6] == "100.0%"


def test_runs_of_other_lengths_are_compared_by_the_image(tmp_path, capsys):
    short = leave_run(tmp_path / "short", "STF", 100.0, 1000)
    long = leave_run(tmp_path / "long", "KNN", 400.0, 2000, images_seen=2500)
    main([short, long])
    printed = capsys.readouterr().out
    assert [row[6] for row in rows(printed)] == ["100.0%", "200.0%"]
    assert rows(printed)[1][2].endswith("*")
    assert f"{long}: without its first 500 images" in printed


def test_what_cannot_be_read_is_said_in_one_line(tmp_path, capsys):
    def complaint(*args):
        with pytest.raises(SystemExit) as stop:
            main(list(args))
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "training_time: nowhere/config.yaml: no such file" in complaint("nowhere")
    run = leave_run(tmp_path / "a", "STF", 0.0)
    assert "records no training" in complaint(run)
    Path(run, "training_time.json").write_text('{"seconds": 3')
    assert "training_time.json is damaged" in complaint(run)
    Path(run, "training_time.json").unlink()
    assert "the run must have callbacks.RunSummary" in complaint(run)
