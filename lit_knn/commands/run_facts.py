"""Collects the facts of a training from its checkpoint and the files in its folder, without paths of the machine."""

import ntpath
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_knn.commands.report import parts_of, read_distances
from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.runs.folder import CONFIG_NAME, config_of_run
from lit_knn.runs.record import RECORD_NAME, read_record
from lit_knn.runs.resumption import RUN_KEY

# The trainer's other options change nothing about the weights.
OF_THE_TRAINER = ("max_steps", "precision", "devices", "num_nodes", "accumulate_grad_batches", "gradient_clip_val")
# These facts of the data are in a checkpoint; the card gives them these names.
OF_THE_DATA = {"images": "images", "data": "hash", "shards": "hash of the shards", "labels": "hash of the labels"}
# An absolute path within a text. A URL or a relative path has a letter, a dot or a colon before its first slash.
ABSOLUTE_PATH = re.compile(r"""(?<![\w/\\.:~-])(?:~|[A-Za-z]:)?(?:[/\\][^/\\\s'",;]+)+[/\\]?""")
LOGGED = "metrics.csv"


@dataclass(frozen=True)
class Facts:
    """What a model card tells of a training, as plain values; what is not known is empty.

    Attributes:
        steps: number of optimiser steps.
        images_seen: number of training images, over all processes.
        hours: time of the training steps, without validations.
        hardware: names of the hardware.
        data: number and hash of the images, and with a record the class, shape and fingerprint of the data.
        metrics: (images seen or None, value) by metric; the last value that was measured up to these weights.
        versions: versions of Python and packages, and the Git revision.
        config: the parts of config.yaml that make the weights.
    """

    steps: int = 0
    images_seen: int = 0
    hours: float = 0.0
    hardware: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, tuple[int | None, float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def collect(checkpoint: Mapping[Any, Any], run: Path) -> Facts:
    """Collect the facts of a checkpoint and of the run folder that it is in, as far as they are there.

    Raises:
        InputError: a count or a time in the checkpoint is no number, or a file in the folder is damaged.
    """
    time = checkpoint.get("training_time") or {}
    try:
        steps, seen = int(checkpoint.get("global_step", 0)), int(checkpoint.get("images_seen", 0))
        hours, hardware = float(time.get("seconds", 0)) / 3600, [str(name) for name in time.get("hardware", ())]
        told = dict(checkpoint.get(RUN_KEY) or {})
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the checkpoint's counts and times are not readable: {error}") from error
    data = {name: told[key] for key, name in OF_THE_DATA.items() if key in told}
    versions: dict[str, str] = {}
    parts = [run]
    if (run / RECORD_NAME).is_file():
        record = read_record(run)
        data = {**record.data, **data}
        versions = {"python": record.python, **record.packages, "revision": record.revision or "-"}
        parts = parts_of(str(run), record)
    facts = Facts(steps, seen, hours, hardware, data, _metrics(parts, seen, steps), versions, _config(run))
    return Facts(**{name: without_paths(value) for name, value in vars(facts).items()})


def _metrics(parts: list[Path], seen: int, steps: int) -> dict[str, tuple[int | None, float]]:
    """Return the last value of each metric up to the checkpoint, of samples and of a CSV logger's validations."""
    found: dict[str, tuple[int | None, float]] = {}
    for part in parts:
        found |= {name: (None, value) for name, value in _logged(part / LOGGED, steps).items()}
    for name, points in read_distances(parts).items():
        before = [point for point in points if point[0] <= seen]
        if before:
            found[name] = before[-1]
    return found


def _logged(path: Path, steps: int) -> dict[str, float]:
    """Read the last value of each `val/…` column of a CSV logger's table, up to a step."""
    if not path.is_file():
        return {}
    found: dict[str, float] = {}
    try:
        for row in read_rows(path):
            if int(row.get("step") or 0) <= steps:
                found |= {name: float(value) for name, value in row.items() if name.startswith("val/") and value}
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    return found


def _config(run: Path) -> dict[str, Any]:
    if not (run / CONFIG_NAME).is_file():
        return {}
    config = config_of_run(run)
    trainer = config["trainer"] if isinstance(config["trainer"], dict) else {}
    return {
        "seed_everything": config.get("seed_everything"),
        "model": config["model"],
        "data": config["data"],
        "trainer": {name: trainer[name] for name in OF_THE_TRAINER if name in trainer},
    }


def without_paths(value: Any) -> Any:
    """Replace each absolute path in plain values by its last part, so that nothing tells of the machine."""
    if isinstance(value, Mapping):
        return {without_paths(name): without_paths(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_paths(part) for part in value)
    if not isinstance(value, str):
        return value
    if posixpath.isabs(value) or ntpath.isabs(value) or value.startswith("~"):
        return _name(value)
    return ABSOLUTE_PATH.sub(lambda match: _name(match[0]), value)


def _name(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\" + os.sep))[-1] or "…"
