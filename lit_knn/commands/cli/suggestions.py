"""Says what to do about a name that does not exist: the nearest class, name or config."""

import difflib
import inspect
import re
import sys
from pathlib import Path

from lit_knn.commands.cli.packaged_configs import hint_of_part

NO_CLASS = re.compile(r"(?:Expected a dot import path string|Unexpected import path format): (\S+)")
NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
NO_OBJECT = re.compile(r"Expected an instantiatable class, but ([\w.]+) is abstract")


def with_suggestion(reason: str) -> str:
    """Add to a parser's reason what to do: the nearest name, or where a file must be."""
    if reason.startswith("No module named"):
        return f"{reason}; a file of your own must be in the current folder"

    if NO_OBJECT.fullmatch(reason):
        return "there is no object that could have this option: give a class first"

    absent = NO_ATTRIBUTE.fullmatch(reason)
    if absent:
        module, name = absent.groups()
        return f"{reason}{_similar_in_module(module, name)}"

    for part in reason.split("; "):
        unknown = NO_CLASS.fullmatch(part)
        if unknown:
            name = unknown[1]
            return f"{name} is neither a class nor a file{_similar(name)}"
    return reason


def _similar_in_module(module: str, name: str) -> str:
    """Return what to add to the message that a module lacks a name: the nearest class or name."""
    contents = vars(sys.modules[module])
    classes = {}
    for known, thing in contents.items():
        if inspect.isclass(thing):
            classes[known.lower()] = known

    near = difflib.get_close_matches(name.lower(), classes, n=1)
    if near:
        return f"; did you mean {module}.{classes[near[0]]}?"

    near = difflib.get_close_matches(name, contents, n=1)
    return f"; did you mean {module}.{near[0]}?" if near else ""


def _similar(name: str) -> str:
    """Return what to add to the message that a class is unknown: the nearest class or config."""
    from pytorch_lightning import loggers  # They take seconds to import.
    from torch import optim

    from lit_knn import callbacks, data, estimators, index, modules, nets

    classes = {}
    for room in (loggers, optim, callbacks, data, estimators, index, modules, nets):
        for known in room.__all__:
            classes[known.lower()] = known

    near = difflib.get_close_matches(Path(name).stem.lower(), classes, n=1)
    if near and "/" not in name:
        return f"; did you mean {classes[near[0]]}?"
    return hint_of_part(name)
