"""Measures how long a training took, over all its resumed parts, and the estimator's share of that time."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn

from lit_knn.common.checkpoint_file import TIME_KEY, Content
from lit_knn.common.errors import InputError
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.common.versions import processor_name
from lit_knn.runs.run import find_callback
from lit_knn.runs.steps import IntervalCallback


@dataclass(frozen=True)
class TrainingTime:
    """Wall-clock time of the training steps on the first rank, without validations.

    `images` counts the images that all ranks trained on in this time. `hardware` names the hardware in
    the order of its use. `+` joins two parts of a run.
    """

    seconds: float = 0.0
    images: int = 0
    estimator_seconds: float = 0.0
    hardware: tuple[str, ...] = ()

    def __add__(self, other: "TrainingTime") -> "TrainingTime":
        names = dict.fromkeys(self.hardware + other.hardware)
        return TrainingTime(
            seconds=self.seconds + other.seconds,
            images=self.images + other.images,
            estimator_seconds=self.estimator_seconds + other.estimator_seconds,
            hardware=tuple(names),
        )

    @property
    def images_per_second(self) -> float:
        """Images per second; NaN if nothing was measured."""
        return self.images / self.seconds if self.seconds else math.nan

    @property
    def estimator_share(self) -> float:
        """The estimator's share of the time, in [0, 1]; NaN if nothing was measured."""
        return self.estimator_seconds / self.seconds if self.seconds else math.nan


def hardware_name(device: torch.device, processes: int) -> str:
    """Return the name of a run's hardware, such as `8 x NVIDIA A100-SXM4-80GB`.

    Args:
        device: the device of this process; the other processes have the same kind.
        processes: the number of processes.
    """
    if device.type == "cuda":
        return f"{processes} x {torch.cuda.get_device_name(device)}"

    number = torch.get_num_threads()
    threads = "1 thread" if number == 1 else f"{number} threads"
    return f"{processes} x {processor_name()} ({threads})"


class TrainingClock(IntervalCallback):
    """Measures and logs images per second and the estimator's share of the time.

    The clock does not run during validations. Checkpoints hold the time of all parts of a run.

    Args:
        estimator_watch: the stopwatch that measures the calls of the estimator.
        images_seen: a function that returns how many images the training has seen, over all ranks.
    """

    def __init__(self, estimator_watch: Stopwatch, images_seen: Callable[[], int]) -> None:
        self._estimator_watch = estimator_watch
        self._images_seen = images_seen
        self._hardware: tuple[str, ...] = ()
        # The time of the parts of the run before this one.
        self._before_resuming = TrainingTime()
        # The time of the earlier intervals of this part.
        self._earlier = TrainingTime()
        # Of the current interval: the images seen before it, its seconds in the estimator that the stopwatch has
        # already told, and its start; None while the clock stands.
        self._images_before = 0
        self._estimator_seconds = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Begin a new interval, for instance after a validation."""
        self.stop()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock until `start`, for instance for a validation."""
        self._earlier = self.elapsed()
        self._started = None
        self._images_before = self._images_seen()
        self._estimator_seconds = 0.0
        # Called to reset it: what it measures while the clock stands does not count.
        self._estimator_watch.read_and_reset()

    def elapsed(self) -> TrainingTime:
        """Return the time of all intervals of this part of the run, with the current one; this waits for the device."""
        if self._started is None:
            return self._earlier
        return self._earlier + self._interval(self._started)

    def _interval(self, started: float) -> TrainingTime:
        """Return the time of the current interval, which began at `started`."""
        self._estimator_seconds += self._estimator_watch.read_and_reset()
        seconds = time.perf_counter() - started
        images = self._images_seen() - self._images_before
        return TrainingTime(seconds, images, self._estimator_seconds)

    def averages(self) -> dict[str, float]:
        """Return the averages of the current interval by the names that loggers get, and begin a new interval."""
        assert self._started is not None
        interval = self._interval(self._started)
        self.start()
        return {
            "train/images_per_s": interval.images_per_second,
            "estimator/share_of_time": interval.estimator_share,
        }

    def total(self) -> TrainingTime:
        """Return the time of the whole training so far, including the time before it was resumed."""
        elapsed = self.elapsed()
        if elapsed.seconds:
            elapsed = replace(elapsed, hardware=self._hardware)
        return self._before_resuming + elapsed

    # Lightning's hooks

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, after all preparations of the run."""
        self._hardware = (hardware_name(trainer.strategy.root_device, trainer.world_size),)
        self.start()

    def at_interval(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the averages."""
        pl_module.log_dict(self.averages())

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Write the time of all parts of the run into the checkpoint."""
        checkpoint[TIME_KEY] = asdict(self.total())

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Take the time of the earlier parts of a resumed run from its checkpoint."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved = dict(checkpoint.get(TIME_KEY, {}))
        saved["hardware"] = tuple(saved.get("hardware", ()))
        self._before_resuming = TrainingTime(**saved)


def training_clock(trainer: pl.Trainer) -> TrainingClock:
    """Return the clock of a training; raise InputError if the module has none."""
    clock = find_callback(trainer, TrainingClock)
    if clock is None:
        raise InputError("the training has no clock; use a module of lit_knn.modules")
    return clock
