"""Names the classes that keep something in a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl

Keys = tuple[Any, ...]
"""The place of a value in a checkpoint: the keys that lead to it, from the outermost."""
Owners = Mapping[Keys, str]
"""The names of the classes that keep values in a checkpoint, by the first keys of these values."""
# `lit_knn.runs.states` looks for the longest first part of a value's keys that has an owner. This empty one is the
# first part of all keys, so its owner is named if no other one is known.
ANY_KEY: Keys = ()


def owners_of(trainer: pl.Trainer) -> dict[Keys, str]:
    """Return the names of the classes that keep values in the checkpoints of a run, by the keys of the values."""
    module = trainer.lightning_module
    data = getattr(trainer, "datamodule", None)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]

    owners: dict[Keys, str] = {}
    for callback in callbacks:
        owners[("callbacks", callback.state_key)] = class_name(type(callback))
    owners[("hyper_parameters",)] = class_name(type(module))
    owners[("optimizer_states",)] = "the optimiser"
    owners[("lr_schedulers",)] = "the schedule of the learning rate"
    owners[ANY_KEY] = " or ".join(_classes_with_own_hook(module, callbacks)) or "the checkpoint"
    if data is not None:
        owners[("datamodule_hyper_parameters",)] = class_name(type(data))
        owners[(type(data).__qualname__,)] = class_name(type(data))
    return owners


def _classes_with_own_hook(
    module: pl.LightningModule, callbacks: Sequence[pl.Callback]
) -> list[str]:
    """Return the names of the classes whose `on_save_checkpoint` is the user's.

    This hook may write under any key, so nobody can tell which hook a value is from. Those of this project
    and of Lightning write only values that can be read.
    """
    names = []
    parts: list[pl.LightningModule | pl.Callback] = [module, *callbacks]
    for part in parts:
        if not _is_known(part.on_save_checkpoint):
            names.append(class_name(type(part)))
    return names


def _is_known(hook: Any) -> bool:
    """Tell whether a hook is defined in this project or in Lightning."""
    return hook.__module__.partition(".")[0] in ("lit_knn", "callbacks", "pytorch_lightning")


def class_name(kind: type) -> str:
    """Return the name of a class with that of its module, as in `class_path`."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
