"""Options of the optimiser in a resumed run: those of the command line win over those of the checkpoint."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

# A schedule sets these options.
SCHEDULED = {"lr", "betas", "momentum"}


def parameter_groups(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimisers, which hold their options."""
    groups: list[dict[str, Any]] = []
    for optimizer in trainer.optimizers:
        groups += optimizer.param_groups
    return groups


def optimiser_options(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Copy the options of each parameter group."""
    options = []
    for group in parameter_groups(trainer):
        options.append({name: value for name, value in group.items() if name != "params"})
    return options


def set_optimiser_options(trainer: pl.Trainer, options: Sequence[dict[str, Any]]) -> None:
    """Give each parameter group the options that were copied, but for those that a schedule sets."""
    scheduled = SCHEDULED if trainer.lr_scheduler_configs else set()
    for group, values in zip(parameter_groups(trainer), options, strict=True):
        for name, value in values.items():
            if name not in scheduled:
                group[name] = value
