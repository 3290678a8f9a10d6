"""Measures training: its time over all resumed parts, the estimator's share of it, and the loss by noise level."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_knn.common.stopwatch import Stopwatch
from lit_knn.common.versions import processor_name
from lit_knn.sampling.schedules import LevelRange

NOISE_BANDS = 4


@dataclass(frozen=True)
class TrainingTime:
    """Wall-clock time of the training steps on the first rank, without validations; `+` joins two parts of a run.

    `images` counts those trained on in that time, over all ranks; `hardware` has names in the order of use.
    """

    seconds: float = 0.0
    images: int = 0
    estimator_seconds: float = 0.0
    hardware: tuple[str, ...] = ()

    def __add__(self, other: "TrainingTime") -> "TrainingTime":
        seconds, estimator = (
            self.seconds + other.seconds,
            self.estimator_seconds + other.estimator_seconds,
        )
        hardware = tuple(dict.fromkeys((*self.hardware, *other.hardware)))
        return TrainingTime(seconds, self.images + other.images, estimator, hardware)

    @property
    def images_per_second(self) -> float:
        """Images per second; NaN if nothing was measured."""
        return self.images / self.seconds if self.seconds else math.nan

    @property
    def estimator_share(self) -> float:
        """The estimator's share of the time, in [0, 1]; NaN if nothing was measured."""
        return self.estimator_seconds / self.seconds if self.seconds else math.nan


def hardware_name(device: torch.device, processes: int) -> str:
    """Name the hardware of a run, such as `8 x NVIDIA A100-SXM4-80GB`; each process has a device of the same kind."""
    if device.type == "cuda":
        return f"{processes} x {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"{processes} x {processor_name()} ({threads} thread{'s' if threads > 1 else ''})"


class TrainingMonitor:
    """Computes averages over the steps since the last `read`. Call `restart` first. Sums stay on the device."""

    def __init__(self, levels: LevelRange, device: torch.device) -> None:
        self.band_edges = levels.bands(NOISE_BANDS).to(device)
        self.estimator_watch = Stopwatch(device)
        self._before = TrainingTime()  # total time of the earlier intervals
        self._forget()

    def _forget(self) -> None:
        self._started: float | None = None
        self._images, self._estimator_seconds = 0, 0.0
        self._band_sum, self._band_count = torch.zeros(
            2, NOISE_BANDS, device=self.band_edges.device
        )
        self.estimator_watch.read_and_reset()

    def restart(self) -> None:
        """Begin a new interval with empty averages, for instance after a validation."""
        self.pause()
        self._started = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock until `restart`, for instance for a validation."""
        self._before = self.elapsed()
        self._forget()

    def elapsed(self) -> TrainingTime:
        """Return the total time of all intervals, including the current one. This waits for the device."""
        return self._before if self._started is None else self._before + self._interval()

    def _interval(self) -> TrainingTime:
        assert self._started is not None
        self._estimator_seconds += self.estimator_watch.read_and_reset()
        return TrainingTime(
            time.perf_counter() - self._started, self._images, self._estimator_seconds
        )

    def update(self, loss: Tensor, t: Tensor, images: int) -> None:
        """Add one batch: losses (B,), noise levels t (B,) float64, and the batch's number of images over all ranks."""
        band = torch.bucketize(t, self.band_edges[1:-1])
        self._band_sum.index_add_(0, band, loss)
        self._band_count.index_add_(0, band, torch.ones_like(loss))
        self._images += images

    def read(self) -> dict[str, float]:
        """Return the averages by name, without those of empty bands, and call `restart`."""
        interval = self._interval()
        values = {"train/images_per_s": interval.images_per_second}
        values["estimator/share_of_time"] = interval.estimator_share
        edges = self.band_edges.tolist()
        for band, (total, count) in enumerate(
            zip(self._band_sum.tolist(), self._band_count.tolist(), strict=True)
        ):
            if count > 0:
                values[f"train/loss_t_{edges[band]:.3g}_to_{edges[band + 1]:.3g}"] = total / count
        self.restart()
        return values
