"""The rule for a class that replaces another one: it starts from its own defaults.

The parser itself would keep every option of the same name, even if it means something else. So a
network on the command line would silently get the channels of the config's network.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import pytorch_lightning as pl
from jsonargparse import Namespace, _typehints
from pytorch_lightning.loggers import Logger

from lit_knn.commands.cli.arguments import as_dict


@dataclass(frozen=True)
class Loss:
    """An option that held for a class, and does not hold for the class that replaces it."""

    old: type
    new: type
    name: str
    value: Any  # of the old class
    default: Any  # of the new class


# If these options of a network are null, they are taken from the data.
TAKEN_FROM_DATA = ("in_channels", "num_classes")

# The losses of one command line. The parser applies the rule several times to one replacement.
_losses: list[Loss] = []
_discard_misfits = _typehints.discard_init_args_on_class_path_change


def declaring_class(kind: type, option: str) -> type | None:
    """Return the class whose constructor has the option: the class itself or a base class."""
    for base in kind.__mro__:
        if "__init__" in vars(base) and option in _parameters(base):
            return base
    return None


def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(vars(kind)["__init__"]).parameters


def stays(old: type, new: type, name: str, value: Any) -> bool:
    """Return whether an option of the old class also holds for the new one.

    An option that both inherit stays, such as the batch size of data. So do the network and the
    estimator of a model, and the folder and the name of a logger, which are those of the run. A
    network whose channels and classes are taken from the data is replaced by another such one.
    """
    if issubclass(new, Logger) or (name in TAKEN_FROM_DATA and value is None):
        return True

    has_class = isinstance(value, Namespace) and "class_path" in value
    is_part_of_model = has_class and issubclass(new, pl.LightningModule)
    return is_part_of_model or declaring_class(old, name) is declaring_class(new, name)


def _discard_options(parser_or_action: Any, before: Any, now: Any) -> None:
    """Remove from the class before, in place, the options that do not stay.

    The parser then adds the options that are given now.
    """
    before_args, now_args = (before or {}).get("init_args"), now.get("init_args")
    if not before_args:
        return

    old, new = resolve_name(before["class_path"]), resolve_name(now["class_path"])
    if not isinstance(old, type) or not isinstance(new, type):
        return

    new_names = vars(now_args) if isinstance(now_args, Namespace) else {}
    for name, value in list(vars(before_args).items()):
        if old is not new and not stays(old, new, name, value):
            del before_args[name]
            if name not in new_names:
                _record(old, new, name, value)
    _discard_misfits(parser_or_action, before, now)


def _record(old: type, new: type, name: str, value: Any) -> None:
    """Record the loss of an option that the new class has, too.

    A callback at the place of another one in a list has lost nothing: one list has replaced another.
    """
    base = declaring_class(new, name)
    if base is not None and not issubclass(new, pl.Callback):
        default = as_dict(_parameters(base)[name].default)
        _losses.append(Loss(old, new, name, as_dict(value), default))


def forget_losses() -> None:
    """Begin a new command line."""
    _losses.clear()


def notes_of_losses(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each class that has its own default where the old one had another value.

    Args:
        options: the parsed command line, of plain dictionaries.
    """
    lost: dict[tuple[type, type], dict[str, Any]] = {}
    for loss in _losses:
        for init_args in _options_of(loss.new, options):
            if init_args.get(loss.name) == loss.default != loss.value:
                lost.setdefault((loss.old, loss.new), {})[loss.name] = loss.value

    for (old, new), values in lost.items():
        listed = ", ".join(f"{name}={value}" for name, value in values.items())
        yield f"{new.__name__} starts from its own defaults, without {old.__name__}'s {listed}"


def _options_of(kind: type, part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the options of each object of a class in a parsed command line."""
    if isinstance(part, list):
        part = dict(enumerate(part))
    if not isinstance(part, Mapping):
        return

    if isinstance(part.get("class_path"), str) and resolve_name(part["class_path"]) is kind:
        yield part.get("init_args") or {}
    for inner in part.values():
        yield from _options_of(kind, inner)


_typehints.discard_init_args_on_class_path_change = _discard_options
