"""Training time excludes validations and adds up resumed parts; the record of a run has it."""

import json
import platform
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import RunRecord
from lit_knn.common import versions
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.estimators import OneSample
from lit_knn.modules import LitICT
from lit_knn.runs import clock as clock_file
from lit_knn.runs.clock import TrainingClock, TrainingTime, hardware_name
from lit_knn.sampling.solvers import euler_step
from tests.interrupted_runs import fit, net

STEP, ESTIMATE, VALIDATION = 10.0, 3.0, 1000.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when a test moves it."""
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(clock_file.time, "perf_counter", lambda: clock.now)
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

    def __init__(self, clock, interrupt_at):
        self.clock, self.interrupt_at = clock, interrupt_at

    def setup(self, *args, **kwargs):
        self.clock.now += VALIDATION

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.interrupt_at:
            raise KeyboardInterrupt
        self.clock.now += STEP

    def on_validation_batch_end(self, *_):
        self.clock.now += VALIDATION


def test_resumed_times_add_up_without_validations_and_setup(tmp_path, clock):
    path = None
    for part, interrupt_at, steps, status in (
        ("a", 4, 4, "interrupted"),
        ("b", None, 9, "finished"),
    ):
        model = LitICT(net(), SlowEstimator(clock), solver=euler_step)
        often = {"val_check_interval": 2, "log_every_n_steps": 3, "num_sanity_val_steps": 1}
        _, path = fit(
            tmp_path / part,
            model,
            9,
            path,
            callbacks=[SlowRun(clock, interrupt_at), RunRecord()],
            **often,
        )
        record = json.loads((tmp_path / part / "run" / "run.json").read_text())
        assert record["time"]["seconds"] == steps * (STEP + ESTIMATE)
        assert record["time"]["estimator_seconds"] == steps * ESTIMATE
        assert record["time"]["images"] == record["images_seen"] == steps * 40
        assert (record["step"], record["status"]) == (steps, status)
        # The hardware is named once, whatever the number of parts.
        assert record["time"]["hardware"] == [hardware_name(torch.device("cpu"), 1)]


def test_interval_averages_are_by_time_without_pauses(clock):
    watch = Stopwatch(torch.device("cpu"))
    images = 100  # of earlier parts
    training = TrainingClock(watch, lambda: images)
    clock.now += 7
    training.start()
    for _ in range(3):
        with watch.running():
            clock.now += 1
        clock.now += 4
        images += 2
        training.elapsed()  # Reading in between changes nothing.
    assert training.elapsed() == TrainingTime(15, 6, 3)
    assert training.averages() == {
        "train/images_per_s": pytest.approx(6 / 15),
        "estimator/share_of_time": pytest.approx(3 / 15),
    }
    training.stop()
    clock.now += 100
    assert training.elapsed() == TrainingTime(15, 6, 3)


# Two processors of one machine, as Linux lists them, and an ARM processor, which has no name.
AMD = 2 * "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("lines", "name"), [(AMD, "AMD EPYC family 26 model 2"), (ARM, platform.machine())]
)
def test_hardware_has_the_generation_of_a_processor(tmp_path, monkeypatch, lines, name):
    monkeypatch.setattr(versions, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(lines)
    assert hardware_name(torch.device("cpu"), 2).startswith(f"2 x {name} (")
