"""Checks that the values that callbacks, data and modules keep in a checkpoint can be read again."""

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
from lit_knn.common.errors import InputError
from lit_knn.common.one_line import one_line
from lit_knn.runs.owners import Keys, Owners, class_name

# `torch.load` reads values of these types; containers must hold such values.
PLAIN = (type(None), bool, int, float, str, bytes, Tensor, nn.Parameter)
CONTAINERS = (dict, OrderedDict, list, tuple, set)
# A checkpoint is useless without these parts, which Lightning writes.
NEEDED = ("state_dict", "loops", "optimizer_states", "lr_schedulers")
# In these parts, each entry is the state of one callback or one option, so one entry can be left out.
PARTS_WITH_ENTRIES = ("callbacks", "hyper_parameters", "datamodule_hyper_parameters")
READABLE = "numbers, text, tensors, or lists and dicts of these"
# The largest number of values that a message names.
LARGEST_NUMBER_NAMED = 3


class Unreadable(NamedTuple):
    """A value in a checkpoint that no command could read, because reading it could run code."""

    keys: Keys  # the keys that lead to it, from the outermost
    value: Any
    is_key: bool = False  # it is itself a key, in the dictionary that `keys` lead to


def unreadable(checkpoint: Mapping[str, object]) -> list[Unreadable]:
    """Return the values of a checkpoint that `torch.load` would refuse, those with fewer keys first."""
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

        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            waiting.append(((*keys, name), item))

    return problems


def _can_be_read(value: object) -> bool:
    """Return whether `torch.load` reads this value after `torch.save` has written it."""
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
    """Return a copy of the checkpoint without the states that hold these values; None if it is useless without one."""
    reduced = dict(checkpoint)

    for problem in problems:
        # Without keys, the problem is the name of a part itself.
        part = problem.keys[0] if problem.keys else problem.value
        if part in NEEDED:
            return None

        if part in PARTS_WITH_ENTRIES and part in reduced and len(problem.keys) > 1:
            # The part is copied, so that the entry stays in the given checkpoint.
            reduced[part] = dict(reduced[part])
            reduced[part].pop(problem.keys[1], None)
        else:
            reduced.pop(part, None)

    return reduced


def explained(problems: list[Unreadable], owners: Owners) -> str:
    """Return one line on values that cannot be read: which class keeps each, and what it should keep instead."""
    lines = [_explained(problem, owners) for problem in problems[:LARGEST_NUMBER_NAMED]]
    more = len(problems) - LARGEST_NUMBER_NAMED
    if more > 0:
        lines.append(f"and {more} more")
    return "; ".join(lines)


def _explained(problem: Unreadable, owners: Owners) -> str:
    """Return words on one value that cannot be read: which class keeps it, and what to keep instead."""
    keys = problem.keys
    # An owner is known by the first two keys, by the first one, or by none, which is `ANY_KEY`.
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
    """Return words for what to keep instead of this value."""
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
    """Raise InputError if a checkpoint of the run, made now, could not be read. Every rank must call it."""
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
    """Raise InputError if there are problems."""
    if problems:
        raise InputError(explained(problems, owners))
