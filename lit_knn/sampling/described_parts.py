"""Describes a model and its parts by plain values that a file can hold: the name of a class and its options."""

from collections.abc import Mapping
from typing import Any, TypedDict

from lit_knn.common.errors import InputError
from lit_knn.nets.architecture import Architecture
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, Process


class ModelDescription(TypedDict, total=False):
    """A model without its weights, as plain values in a file."""

    kind: str
    image_shape: list[int]
    options: dict[str, object]  # what `GenerativeModel.options` returns
    architecture: Architecture | None  # None if the network's class is a user's
    class_names: list[str]  # of the classes 0, 1, …, if they have names


# A file can name only these processes.
PROCESSES: dict[str, type[Process]] = {
    process.__name__: process for process in (EDM, VP, LinearInterpolant)
}


def named_process(process: Process) -> dict[str, object]:
    """Return the class and the arguments of a process.

    A user's own process is named "own", because no file can make it.
    """
    if type(process) not in PROCESSES.values():
        return {"class": "own"}

    return {"class": type(process).__name__, **vars(process)}


def process_of(description: object) -> Process:
    """Make the process that a file describes; raise InputError if it is not one of `PROCESSES`."""
    name, options = class_and_options("process", description, PROCESSES)
    return PROCESSES[name](**options)


def class_and_options(
    option: str, description: object, known: Mapping[str, object]
) -> tuple[str, dict[str, Any]]:
    """Split {"class": …, …} into the name of a known class and its options.

    Args:
        option: name of the part, for the error message.
        description: what the file says about the part.
        known: the classes that a file can name, by their names.
    """
    options = dict(description) if isinstance(description, dict) else {}
    name = options.pop("class", None)
    if name not in known:
        rule = f"must name one of {', '.join(known)} as its class"
        raise InputError(f"{option} {rule}, got {description!r:.80}")
    return name, options
