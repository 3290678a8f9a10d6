"""The rule for a class that replaces another one: it starts from its own defaults.

The parser itself would keep every option of the same name, even if it means something else. So a
network on the command line would silently get the channels of the config's network.
"""

import inspect
from collections.abc import Mapping
from pkgutil import resolve_name

import pytorch_lightning as pl
from jsonargparse import Namespace, _typehints
from pytorch_lightning.loggers import Logger

# If these options of a network are null, they are taken from the data.
TAKEN_FROM_DATA = ("in_channels", "num_classes")

_discard_misfits = _typehints.discard_init_args_on_class_path_change


def declaring_class(kind: type, option: str) -> type | None:
    """Return the class whose constructor has the option: the class itself or a base class."""
    for base in kind.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is not None and option in inspect.signature(constructor).parameters:
            return base
    return None


def stays(old: type, new: type, name: str, value: object) -> bool:
    """Return whether an option of the old class also holds for the new one.

    An option that both inherit stays, such as the batch size of data. So do the network and the
    estimator of a model, and the folder and the name of a logger, which are those of the run. A
    network whose channels and classes are taken from the data is replaced by another such one.

    Args:
        old: the class that is replaced.
        new: the class that replaces it.
        name: name of the option.
        value: its value for the old class.
    """
    if issubclass(new, Logger) or (name in TAKEN_FROM_DATA and value is None):
        return True

    has_class = isinstance(value, Namespace) and "class_path" in value
    is_part_of_model = has_class and issubclass(new, pl.LightningModule)
    return is_part_of_model or declaring_class(old, name) is declaring_class(new, name)


def _clear_options(
    parser: object, before: Mapping[str, object] | None, now: Mapping[str, object]
) -> None:
    """Remove from the class before, in place, the options that do not stay.

    The parser then adds the options that are given now.
    """
    options = before.get("init_args") if before else None
    if before is None or not isinstance(options, Namespace):
        return

    old = resolve_name(str(before["class_path"]))
    new = resolve_name(str(now["class_path"]))
    if not isinstance(old, type) or not isinstance(new, type) or old is new:
        return

    for name, value in list(vars(options).items()):
        if not stays(old, new, name, value):
            del options[name]
    _discard_misfits(parser, before, now)


def set_rule() -> None:
    """Let the parser clear the options of a class that is replaced. It has no public way to this."""
    _typehints.discard_init_args_on_class_path_change = _clear_options
