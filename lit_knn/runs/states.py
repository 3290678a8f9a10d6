"""Checks that what callbacks, data and modules keep in a checkpoint can be read again."""

import io
from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, one_line
from lit_knn.runs.owners import Keys, Owners, class_name

PLAIN = (type(None), bool, int, float, str, bytes, Tensor, nn.Parameter)
CONTAINERS = (dict, OrderedDict, list, tuple, set)
# No checkpoint is of use without these parts, which Lightning writes.
NEEDED = ("state_dict", "loops", "optimizer_states", "lr_schedulers")
# Each entry of these parts belongs to one owner, or is one option.
PARTS_OF_SEVERAL = ("callbacks", "hyper_parameters", "datamodule_hyper_parameters")
READABLE = "numbers, text, tensors, or lists and dicts of these"
# A message names so many values.
NAMED = 3


class Unreadable(NamedTuple):
    """A value in a checkpoint that no command could read, because reading it could run code."""

    keys: Keys  # where it is, from the outermost key
    value: Any
    is_key: bool = False  # it is a key of the dictionary at `keys`


def unreadable(checkpoint: Mapping[str, object]) -> list[Unreadable]:
    """Return the values of a checkpoint that `torch.load` would refuse, the outer ones first."""
    problems: list[Unreadable] = []
    waiting: deque[tuple[Keys, Any]] = deque([((), checkpoint)])
    seen = set()

    while waiting:
        keys, value = waiting.popleft()
        if id(value) in seen or type(value) in PLAIN:
            continue

        if type(value) not in CONTAINERS:
            if not _can_be_read(value):
                problems.append(Unreadable(keys, value))
            continue

        seen.add(id(value))  # A list may hold itself.
        if isinstance(value, dict):
            for name in value:
                if not _can_be_read(name):
                    problems.append(Unreadable(keys, name, is_key=True))

        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            waiting.append(((*keys, name), part))

    return problems


def _can_be_read(value: object) -> bool:
    """Tell whether `torch.load` reads a value that `torch.save` has written."""
    if type(value) in PLAIN:
        return True

    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # A user's class can fail in any way.
        return False
    return True


def without(checkpoint: Content, problems: list[Unreadable]) -> Content | None:
    """Return the checkpoint without the states that hold these values, or None if it needs one."""
    reduced = dict(checkpoint)

    for problem in problems:
        # An outermost key lies in no part.
        part = problem.keys[0] if problem.keys else problem.value
        if part in NEEDED:
            return None

        if part in PARTS_OF_SEVERAL and part in reduced and len(problem.keys) > 1:
            # The checkpoint itself must keep its parts.
            reduced[part] = dict(reduced[part])
            reduced[part].pop(problem.keys[1], None)
        else:
            reduced.pop(part, None)

    return reduced


def explained(problems: list[Unreadable], owners: Owners) -> str:
    """Say in one line who keeps which value that cannot be read, and what to keep in its place."""
    lines = [_explained(problem, owners) for problem in problems[:NAMED]]
    more = len(problems) - NAMED
    if more > 0:
        lines.append(f"and {more} more")
    return "; ".join(lines)


def _explained(problem: Unreadable, owners: Owners) -> str:
    """Say who keeps this value, and what to keep in its place."""
    keys = problem.keys
    # The owner of a state is known by one or two keys.
    length = 2
    while length > 0 and keys[:length] not in owners:
        length -= 1
    owner = owners.get(keys[:length], "the checkpoint")

    inside = ".".join(map(str, keys[length:]))
    what = "its state"
    if inside:
        what = f"its state `{inside}`"
    if problem.is_key:
        what = f"a key of {what}"

    kind = type(problem.value)
    return f"{owner}: {what} is {class_name(kind)}; give {_instead(problem.value)}"


def _instead(value: object) -> str:
    """Return what to keep in the place of a value."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PurePath):
        return "str"
    if isinstance(value, np.ndarray):
        return "a list or a tensor"

    for kind in PLAIN + CONTAINERS:
        if isinstance(value, kind):
            return kind.__name__
    return READABLE


def check_states(trainer: pl.Trainer, owners: Owners) -> None:
    """Raise InputError if a checkpoint of the run as it is now could not be read.

    Every rank must call it.
    """
    try:
        # Lightning has no public name for making a checkpoint without writing it.
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    except InputError:
        raise
    except Exception as error:  # A user's hook may need a step first.
        problem = f"no checkpoint can be made before the first step: {one_line(error)[0]}"
        rank_zero_warn(f"{problem}; the first save ends the run if this is still so")
        return

    problems = unreadable(checkpoint)
    on_first_rank(lambda: _refuse(problems, owners))


def _refuse(problems: list[Unreadable], owners: Owners) -> None:
    if problems:
        raise InputError(explained(problems, owners))
