"""Noise processes as plain data: the name of one of ours and its options."""

from inspect import signature
from typing import Any

from lit_knn.errors import InputError
from lit_knn.generative_models.base import is_known, named
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, Process

# A file can name these processes alone.
PROCESSES: dict[str, type[Process]] = {process.__name__: process for process in (EDM, VP, LinearInterpolant)}


def named_process(process: Process) -> dict[str, Any]:
    """Return the class and the arguments of a process; a user's own is named "own", because no file can make it."""
    if not is_known(process, PROCESSES):
        return {"class": "own"}
    return {
        "class": type(process).__name__,
        **{name: getattr(process, name) for name in signature(type(process)).parameters},
    }


def process_of(told: object) -> Process:
    """Make the process that a file names with its options; raise InputError for others."""
    name, given = named("process", told, PROCESSES)
    for option, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{option} must be a number, got {value!r:.80}")
    return PROCESSES[name](**given)
