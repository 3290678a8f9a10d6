"""The record of a training run, `run.json` in its folder: what ran, on which data and machine, and how long."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.memory import process_bytes
from lit_knn.common.versions import package_versions, revision
from lit_knn.runs.clock import TrainingTime

RECORD_NAME = "run.json"


@dataclass
class Record:
    """The record of a training run, or of its last part, if it was resumed."""

    command: str = field(default_factory=lambda: shlex.join(sys.argv))
    status: str = "running"  # or `finished`, or how the run ended; a killed run stays `running`
    # the time when this part began
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    wall_seconds: float = 0.0  # duration of this part, with validations
    resumed_from: str | None = None  # the checkpoint in another folder that the run started from
    revision: str | None = field(default_factory=revision)
    python: str = field(default_factory=platform.python_version)
    packages: dict[str, str] = field(default_factory=package_versions)
    # facts of the data module and its reference set, which `RunRecord` collects
    data: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    time: TrainingTime = field(default_factory=TrainingTime)  # time of the steps of all parts
    images_seen: int = 0  # number over all parts and processes
    step: int = 0  # number of optimiser steps of all parts
    memory_gb: float = 0.0  # peak memory of the first process in this part, in 10⁹ bytes
    gpu_memory_gb: float = 0.0  # peak memory of its tensors on the GPU; 0 without a GPU

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Set the duration and the peaks of memory, and write `run.json` into the folder of the run."""
        started = datetime.fromisoformat(self.started)
        self.wall_seconds = (datetime.now(UTC) - started).total_seconds()
        self.memory_gb = process_bytes("VmHWM") / 1e9  # VmHWM is Linux's name of the peak
        self.gpu_memory_gb = 0.0
        if torch.cuda.is_initialized():
            self.gpu_memory_gb = torch.cuda.max_memory_allocated() / 1e9

        with written_whole(Path(folder) / RECORD_NAME) as partial:
            partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_record(folder: str | os.PathLike[str]) -> Record:
    """Read `run.json` from the folder of a run; raise InputError if it is missing or damaged."""
    path = Path(folder) / RECORD_NAME
    if not path.is_file():
        writer = "lit_knn.callbacks.RunRecord writes it, which `lit-knn fit` always has"
        raise InputError(f"{path}: no such file; {writer}")

    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        time = fields["time"]
        time["hardware"] = tuple(time["hardware"])
        fields["time"] = TrainingTime(**time)
        return Record(**fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error!r}") from error


def images_without_mirrored(data: Mapping[str, Any]) -> int:
    """Return the number of images without mirror images; `data` is `Record.data`, which counts mirror images, too."""
    number: int = data["images"]
    return number // 2 if data.get("hflip") else number
