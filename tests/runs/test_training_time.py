"""Training time excludes validations and adds up resumed parts; the record of a run has it."""

import json
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import LastCheckpoint, RunRecord
from lit_knn.data import Digits
from lit_knn.estimators import OneSample
from lit_knn.modules import LitICT
from lit_knn.nets import UNet
from lit_knn.runs import clock as monitor
from lit_knn.runs.clock import TrainingMonitor, TrainingTime, hardware_name
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.sampling.solvers import euler_step

STEP, ESTIMATE, VALIDATION = 10.0, 3.0, 1000.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when a test moves it."""
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: clock.now)
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
    callbacks = [SlowRun(clock, interrupt_at), LastCheckpoint(dirpath=str(folder)), RunRecord()]
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
    record = json.loads((folder / "run.json").read_text())
    return record["time"] | record


def test_parts_of_a_resumed_run_add_up_without_validations_and_setup(tmp_path, clock):
    first = train(tmp_path / "a", clock, 9, interrupt_at=4)
    resumed = train(tmp_path / "b", clock, 9, ckpt_path=tmp_path / "a" / "last.ckpt")
    for record, steps, status in ((first, 4, "interrupted"), (resumed, 9, "finished")):
        assert record["seconds"] == steps * (STEP + ESTIMATE)
        assert record["estimator_seconds"] == steps * ESTIMATE
        assert record["images"] == record["images_seen"] == steps * 64
        assert (record["step"], record["status"]) == (steps, status)
        # The hardware is named once, whatever the number of parts.
        assert record["hardware"] == [hardware_name(torch.device("cpu"), 1)]


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
    assert averages["train/images_per_s"] == pytest.approx(6 / 15)
    assert averages["estimator/share_of_time"] == pytest.approx(3 / 15)
    monitor.pause()
    clock.now += 100
    assert monitor.elapsed() == TrainingTime(15, 6, 3)
