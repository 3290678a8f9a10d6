"""The time that a training took, summed over its resumed parts, and its hardware."""

from dataclasses import dataclass

import torch

from lit_knn.common.versions import processor_name


@dataclass(frozen=True)
class TrainingTime:
    """Time of the training steps on the first rank, without validations; `+` joins two parts of a run.

    Attributes:
        seconds: wall-clock time.
        images: number of images trained on in that time, over all ranks.
        estimator_seconds: seconds spent in the estimator.
        hardware: names of the hardware, in the order of use.
    """

    seconds: float = 0.0
    images: int = 0
    estimator_seconds: float = 0.0
    hardware: tuple[str, ...] = ()

    def __add__(self, other: "TrainingTime") -> "TrainingTime":
        return TrainingTime(
            self.seconds + other.seconds,
            self.images + other.images,
            self.estimator_seconds + other.estimator_seconds,
            tuple(dict.fromkeys((*self.hardware, *other.hardware))),
        )

    @property
    def images_per_second(self) -> float:
        """Images per second; NaN if nothing was measured."""
        return self.images / self.seconds if self.seconds else float("nan")

    @property
    def estimator_share(self) -> float:
        """The estimator's share of the time, in [0, 1]; NaN if nothing was measured."""
        return self.estimator_seconds / self.seconds if self.seconds else float("nan")


def hardware_name(device: torch.device, processes: int) -> str:
    """Name the hardware of a run, such as `8 x NVIDIA A100-SXM4-80GB`; each process has a device of the same kind."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return f"{processes} x {name}"


def _processor() -> str:
    threads = torch.get_num_threads()
    return f"{processor_name()} ({threads} thread{'s' if threads > 1 else ''})"


def duration(seconds: float) -> str:
    """Write a time for people: `0.034 s`, `2.6 s`, `2 min 50 s`, `3 h 5 min` or `12 days`."""
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"{seconds / 86400:.0f} days"
