"""Says which class or option may be meant by one that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from types import ModuleType

from lit_knn.commands.cli.packaged_configs import FILES, hint_of_part, names


def nearest(name: str | None, known: Iterable[str], prefix: str = "") -> str:
    """Return what to add to a message: the known name that is most like an unknown one, or nothing.

    Args:
        name: the unknown name.
        known: the names that there are.
        prefix: stands before the known name in the message.
    """
    for near in get_close_matches(name or "", known, n=1):
        return f"; did you mean {prefix}{near}?"
    return ""


def nearest_class(name: str) -> str:
    """Return what to add to the message that a class is unknown: the nearest class or config."""
    from pytorch_lightning import loggers  # They take seconds to import.
    from torch import optim

    from lit_knn import callbacks, data, estimators, index, modules, nets

    classes = {}
    for room in (loggers, optim, callbacks, data, estimators, index, modules, nets):
        for public_name in room.__all__:
            classes[public_name.lower()] = public_name

    near = get_close_matches(Path(name).stem.lower(), classes, n=1)
    if near and "/" not in name:
        return f"; did you mean {classes[near[0]]}?"
    return hint_of_part(name)


def hint_of_argument(argument: str, options: Iterable[str]) -> str:
    """Return what to add to the message that an argument is unknown: what may be meant.

    Args:
        argument: the first unknown one, such as `--lr`.
        options: the names of the command's options, such as `trainer.max_steps`.
    """
    if argument.startswith("-"):
        meant = options_like(argument.lstrip("-").partition("=")[0], list(options))
        choices = " or ".join(f"--{option}" for option in meant)
        return f"; did you mean {choices}?" if choices else ""

    if argument in names() or Path(argument).suffix in FILES:
        return f"; each config needs an option of its own: -c {argument}"
    return ""


def options_like(name: str, options: list[str]) -> list[str]:
    """Return the options that may be meant by an unknown one, at most two of a part.

    Args:
        name: the unknown option, without dashes.
        options: the names of the command's options. Those of model and data are not among them.
    """
    in_parts = [option for option in options if option.endswith(f".{name}")]
    in_parts += _in_classes(name)
    if in_parts and name != "seed":  # One option sets the seeds of all parts.
        return in_parts

    part, dot, after_part = name.partition(".")
    parts = {option.partition(".")[0] for option in options}
    if dot and part not in parts:
        return [f"{near}.{after_part}" for near in get_close_matches(part, parts, n=1)]

    beginning, _, word = name.rpartition(".")
    longer = [option for option in options if option.startswith(beginning) and word in option]
    if longer:
        return sorted(get_close_matches(name, longer, n=2, cutoff=0))
    return get_close_matches(name, options, n=1)


def _in_classes(name: str) -> list[str]:
    """Return the options of this name that classes of the project have."""
    from lit_knn import data, estimators, modules

    rooms = {"model": modules, "model.estimator": estimators, "data": data}
    return [f"{part}.{name}" for part, room in rooms.items() if _has_option(room, name)]


def _has_option(room: ModuleType, name: str) -> bool:
    """Return whether a class of a package has an option of this name."""
    for public_name in room.__all__:
        public: object = getattr(room, public_name)
        if isinstance(public, type) and name in signature(public).parameters:
            return True
    return False
