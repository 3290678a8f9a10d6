"""Noise processes as plain data: the name of one of ours and its options."""

from typing import Any

from lit_knn.common.errors import InputError
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, Process

# A file can name these processes alone.
PROCESSES: dict[str, type[Process]] = {process.__name__: process for process in (EDM, VP, LinearInterpolant)}


def named_process(process: Process) -> dict[str, Any]:
    """Return the class and the arguments of a process; a user's own is named "own", because no file can make it."""
    if type(process) not in PROCESSES.values():
        return {"class": "own"}
    return {"class": type(process).__name__, **vars(process)}


def process_of(told: object) -> Process:
    """Make the process that a file names with its options; raise InputError for others."""
    name, given = named("process", told, PROCESSES)
    return PROCESSES[name](**given)


def named(option: str, told: object, known: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split {"class": …, …} into the name of a known class and its options."""
    name = str(told.get("class")) if isinstance(told, dict) else None
    if not isinstance(told, dict) or name not in known:
        raise InputError(f"{option} must name one of {', '.join(known)} as its class, got {told!r:.80}")
    return name, {key: value for key, value in told.items() if key != "class"}
