"""The rule for a class that replaces another one, such as `--model.net` the network of a config file.

The new class starts from its own defaults, but for the options that `holds_for_new_class` names. The
parser itself would keep every option of the same name, even if it means something else: a network on
the command line would silently get the channels of the config's network.
"""

import inspect
from collections.abc import Mapping
from pkgutil import resolve_name

import pytorch_lightning as pl
from jsonargparse import Namespace, _typehints
from pytorch_lightning.loggers import Logger

# If these options of a network are null, they are taken from the data.
TAKEN_FROM_DATA = ("in_channels", "num_classes")

# The parser's own rule: it removes the options that the new class does not have.
_discard_unknown_options = _typehints.discard_init_args_on_class_path_change


def declaring_class(kind: type, option: str) -> type | None:
    """Return the class whose constructor has the option, which is `kind` or a base class; None if there is none."""
    for base in kind.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is not None and option in inspect.signature(constructor).parameters:
            return base
    return None


def holds_for_new_class(old: type, new: type, name: str, value: object) -> bool:
    """Return whether an option of the old class also holds for the new one, by one of four rules.

    1. Every option of a logger does: they name the folder of the run.
    2. So does an option of a network that is null because it is taken from the data.
    3. So does a part of a model that is an object, such as its network or its estimator.
    4. So does an option that both classes inherit from the same class, such as the batch size of data.

    Args:
        old: the class that is replaced.
        new: the class that replaces it.
        name: name of the option.
        value: its value for the old class.
    """
    is_logger = issubclass(new, Logger)
    is_taken_from_data = name in TAKEN_FROM_DATA and value is None
    is_object = isinstance(value, Namespace) and "class_path" in value
    is_part_of_model = is_object and issubclass(new, pl.LightningModule)
    is_inherited = declaring_class(old, name) is declaring_class(new, name)
    return is_logger or is_taken_from_data or is_part_of_model or is_inherited


def _clear_options(
    parser: object, before: Mapping[str, object] | None, now: Mapping[str, object]
) -> None:
    """Remove, in place, the options of the old class that do not hold for the new one.

    The parser then adds the options that are given for the new class.

    Args:
        parser: the parser.
        before: class_path and init_args of the old class; None if there is none.
        now: class_path of the new class.
    """
    options = before.get("init_args") if before else None
    if before is None or not isinstance(options, Namespace):
        return

    old = resolve_name(str(before["class_path"]))
    new = resolve_name(str(now["class_path"]))
    if not isinstance(old, type) or not isinstance(new, type) or old is new:
        return

    for name, value in list(vars(options).items()):
        if not holds_for_new_class(old, new, name, value):
            del options[name]
    _discard_unknown_options(parser, before, now)


def set_rule() -> None:
    """Replace the parser's own rule by this module's; the parser has no public function for this."""
    _typehints.discard_init_args_on_class_path_change = _clear_options
