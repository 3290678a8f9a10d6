"""Names the classes that keep something in a checkpoint."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl

Keys = tuple[Any, ...]
# The names of those who keep something in a checkpoint, by where they keep it.
Owners = Mapping[Keys, str]


def owners_of(trainer: pl.Trainer) -> dict[Keys, str]:
    """Return the classes that keep something in the checkpoints of a run, by where they keep it."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]

    # This hook of callbacks and module may add any key. Ours add readable ones.
    adding = []
    if not _is_known(module.on_save_checkpoint):
        adding.append(class_name(type(module)))
    for callback in callbacks:
        if not _is_known(callback.on_save_checkpoint):
            adding.append(class_name(type(callback)))

    owners: dict[Keys, str] = {}
    for callback in callbacks:
        owners[("callbacks", callback.state_key)] = class_name(type(callback))
    owners[("hyper_parameters",)] = class_name(type(module))
    owners[("optimizer_states",)] = "the optimiser"
    owners[("lr_schedulers",)] = "the schedule of the learning rate"
    owners[()] = " or ".join(adding) or "the checkpoint"
    if data is not None:
        owners[("datamodule_hyper_parameters",)] = class_name(type(data))
        owners[(type(data).__qualname__,)] = class_name(type(data))
    return owners


def _is_known(hook: Any) -> bool:
    """Tell whether a hook is of this project or of Lightning."""
    return hook.__module__.partition(".")[0] in ("lit_knn", "callbacks", "pytorch_lightning")


def class_name(kind: type) -> str:
    """Return the name of a class with that of its module, as options name it."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
