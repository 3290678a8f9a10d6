"""Finds and reads checkpoint files. It checks every byte before use, and runs no code from a file."""

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, first_line

Content: TypeAlias = dict[str, Any]
"""The content of a checkpoint: Lightning's keys, and those that modules, data and callbacks add."""
MODEL_KEY = "generative_model"
"""Key of the model's description in a checkpoint, with the prefix of the network's weights in `state_dict`."""
RUN_KEY = "run"
"""Key of the numbers and names that must stay the same when the run is resumed, see `lit_knn.runs.same_run`."""
TIME_KEY = "training_time"
"""Key of the time that the training took, see `lit_knn.runs.clock.TrainingTime`."""
CHECKPOINTS = "checkpoints"
LAST_NAME = "last.ckpt"
# `CheckpointByImages` gives its files these names.
KEPT_NAME = re.compile(r"images_seen=(\d+)\.ckpt")


def read_checkpoint_file(path: str | os.PathLike[str], mmap: bool = False) -> Content:
    """Read a file that `torch.save` wrote, onto the CPU; `mmap` leaves the tensors on the disk until they are used.

    Raises InputError for every file that is missing, damaged, of another kind, or needs code to be read.
    """
    path = Path(path)
    _check_zip(path)
    try:
        # Only plain values and tensors are loaded. Everything else could run code.
        content = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:  # A hostile file can raise any exception.
        problem = "is damaged, or no checkpoint"
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused:
            problem = f"names the global {refused[1]}, which is refused"
        raise InputError(f"{path} {problem}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is no checkpoint: it holds {type(content).__name__}, not a dict")
    return content


def not_finite(weights: Mapping[str, object]) -> str | None:
    """Return the name of the first tensor with a value that is not finite, or None.

    A module's own extra state may be of any type, and is not looked at.
    """
    for name, value in weights.items():
        if isinstance(value, Tensor) and not value.isfinite().all():
            return name
    return None


def _check_zip(path: Path) -> None:
    """Raise InputError if the file is not an undamaged zip. PyTorch itself checks no checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    except Exception as error:  # Damaged headers can raise any exception.
        raise InputError(f"{path} is damaged, or no checkpoint: {first_line(error)}") from error
    if damaged is not None:
        raise InputError(f"{path} is damaged: the checksum of its part {damaged!r} is wrong")


def kept_in(folder: Path) -> dict[int, Path]:
    """Find the checkpoints that `CheckpointByImages` kept in a folder: paths by images seen, ascending."""
    paths = {}
    for path in folder.glob("*.ckpt"):
        match = KEPT_NAME.fullmatch(path.name)
        if match:
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


def last_checkpoint(run: str | Path) -> Path:
    """Find the checkpoint that represents a run.

    This is `checkpoints/last.ckpt`, or else the kept one with the most images.
    """
    folder = Path(run) / CHECKPOINTS
    if (folder / LAST_NAME).is_file():
        return folder / LAST_NAME

    paths = kept_in(folder)
    if paths:
        return paths[max(paths)]

    rule = f"has neither {CHECKPOINTS}/{LAST_NAME} nor a kept checkpoint (images_seen=N.ckpt)"
    raise InputError(f"{run} {rule}{hint_of_runs(run)}")


def hint_of_runs(folder: str | Path) -> str:
    """Return the end of a message that a folder is not a run's: it names the runs inside, or is ""."""
    parent = Path(folder)
    runs = []
    for pattern in (f"*/{CHECKPOINTS}", f"*/*/{CHECKPOINTS}"):
        for checkpoints in parent.glob(pattern):
            runs.append(checkpoints.parent.relative_to(parent).as_posix())

    if not runs:
        return ""
    return f"; it holds the runs {', '.join(sorted(runs)):.200}"
