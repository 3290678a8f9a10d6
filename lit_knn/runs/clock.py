"""Measures training: its time over all resumed parts, and the loss by noise level."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_knn.common.stopwatch import Stopwatch
from lit_knn.common.versions import processor_name
from lit_knn.sampling.noise_grid import LevelRange

NOISE_BANDS = 4


@dataclass(frozen=True)
class TrainingTime:
    """Wall-clock time of the training steps on the first rank, without validations.

    `images` counts those trained on in that time, over all ranks; `hardware` has names in the order
    of use. `+` joins two parts of a run.
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
    """Name the hardware of a run, such as `8 x NVIDIA A100-SXM4-80GB`.

    Each process has a device of the same kind.
    """
    if device.type == "cuda":
        return f"{processes} x {torch.cuda.get_device_name(device)}"

    number = torch.get_num_threads()
    threads = "1 thread" if number == 1 else f"{number} threads"
    return f"{processes} x {processor_name()} ({threads})"


class TrainingMonitor:
    """Computes averages over the steps since the last `read`. Call `restart` first.

    Sums stay on the device.
    """

    def __init__(self, levels: LevelRange, device: torch.device) -> None:
        self.band_edges = levels.bands(NOISE_BANDS).to(device)
        self.estimator_watch = Stopwatch(device)
        self._before = TrainingTime()  # total time of the earlier intervals
        self._forget()

    def _forget(self) -> None:
        """Empty the averages."""
        self._started: float | None = None
        self._images, self._estimator_seconds = 0, 0.0
        self._band_sum = torch.zeros(NOISE_BANDS, device=self.band_edges.device)
        self._band_count = torch.zeros(NOISE_BANDS, device=self.band_edges.device)
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
        """Return the time of all intervals, with the current one; this waits for the device."""
        if self._started is None:
            return self._before
        return self._before + self._interval()

    def _interval(self) -> TrainingTime:
        """Return the time of the current interval."""
        assert self._started is not None
        self._estimator_seconds += self.estimator_watch.read_and_reset()
        seconds = time.perf_counter() - self._started
        return TrainingTime(seconds, self._images, self._estimator_seconds)

    def update(self, loss: Tensor, t: Tensor, images: int) -> None:
        """Add one batch.

        Args:
            loss: (B,).
            t: noise levels, (B,) float64.
            images: the batch's number of images, over all ranks.
        """
        band = torch.bucketize(t, self.band_edges[1:-1])
        self._band_sum.index_add_(0, band, loss)
        self._band_count.index_add_(0, band, torch.ones_like(loss))
        self._images += images

    def read(self) -> dict[str, float]:
        """Return the averages by name, without those of empty bands, and call `restart`."""
        interval = self._interval()
        values = {
            "train/images_per_s": interval.images_per_second,
            "estimator/share_of_time": interval.estimator_share,
        }

        edges = self.band_edges.tolist()
        totals, counts = self._band_sum.tolist(), self._band_count.tolist()
        for band in range(NOISE_BANDS):
            total, count = totals[band], counts[band]
            if count > 0:
                name = f"train/loss_t_{edges[band]:.3g}_to_{edges[band + 1]:.3g}"
                values[name] = total / count

        self.restart()
        return values
