"""The optimiser and the schedule of a resumed run, whose classes must be those of the checkpoint.

The options of the optimiser are those of the new run, except for those that a schedule sets.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import TrainerFn

from lit_knn.common.checkpoint_file import RUN_KEY, Content
from lit_knn.common.errors import InputError

ParameterGroup: TypeAlias = dict[str, Any]
"""The options of an optimiser for some parameters, as PyTorch keeps them, such as lr and betas."""
# A schedule sets these options.
SCHEDULED = {"lr", "betas", "momentum"}


class ResumedOptimiser(pl.Callback):
    """Refuses a checkpoint of another optimiser or schedule, and keeps the options of the resumed run.

    Lightning alone would replace these options by those of the checkpoint.
    """

    def __init__(self) -> None:
        self._saved_classes: Mapping[str, object] = {}
        self._saved_groups: list[ParameterGroup] = []
        self._options: list[ParameterGroup] = []

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Note the classes and options of the checkpoint for `on_fit_start`, because there is no optimiser yet."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._saved_classes = checkpoint.get(RUN_KEY, {})
        self._saved_groups = []
        for state in checkpoint["optimizer_states"]:
            self._saved_groups += state["param_groups"]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the optimiser, and copy its options before Lightning replaces them by the checkpoint's."""
        check_optimisation(trainer, self._saved_classes, self._saved_groups)
        self._options = []
        for group in parameter_groups(trainer):
            self._options.append({name: group[name] for name in group if name != "params"})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the optimiser back the options of this run, except for those that a schedule sets."""
        scheduled = SCHEDULED if trainer.lr_scheduler_configs else set()
        for group, options in zip(parameter_groups(trainer), self._options, strict=True):
            for name, value in options.items():
                if name not in scheduled:
                    group[name] = value


def parameter_groups(trainer: pl.Trainer) -> list[ParameterGroup]:
    """Return the parameter groups of all optimisers; a group has the options for its parameters."""
    groups: list[ParameterGroup] = []
    for optimizer in trainer.optimizers:
        groups += optimizer.param_groups
    return groups


def optimisation(trainer: pl.Trainer) -> dict[str, str]:
    """Return the names of the classes of optimiser and schedule, with the length of the schedule.

    A checkpoint has their states, which fit no other classes and no other length.
    """
    schedules = []
    for config in trainer.lr_scheduler_configs:
        schedule = type(config.scheduler).__name__
        # A cosine schedule calls its length T_max; other schedules with a length call it total_steps.
        cosine_steps = getattr(config.scheduler, "T_max", None)
        steps = getattr(config.scheduler, "total_steps", cosine_steps)
        if steps is not None:
            schedule = f"{schedule} of {steps} steps"
        schedules.append(schedule)

    optimizers = [type(optimizer).__name__ for optimizer in trainer.optimizers]
    return {"optimizer": ", ".join(optimizers), "lr_scheduler": ", ".join(schedules) or "none"}


def check_optimisation(
    trainer: pl.Trainer, before: Mapping[str, object], groups: Sequence[ParameterGroup]
) -> None:
    """Raise InputError for an optimiser, schedule or rate that is not the checkpoint's, or a schedule too short.

    Args:
        trainer: the trainer of the run, with its optimisers.
        before: the result of `optimisation` for the run that wrote the checkpoint; empty for a new run.
        groups: the parameter groups of the checkpoint; none for a new run.
    """
    advice = "give the same, or start a new run"
    for name, now in optimisation(trainer).items():
        if before.get(name, now) != now:
            problem = f"the checkpoint has the state of {name} {before[name]}, not of {now}"
            raise InputError(f"--ckpt_path: {problem}: {advice}")

    for saved, group in zip(
        groups, parameter_groups(trainer), strict=False
    ):  # A new run has no saved ones.
        for name in ("initial_lr", "max_lr"):
            if saved.get(name) != group.get(name):
                problem = f"its schedule has {name}={saved.get(name)}, not {group.get(name)}"
                raise InputError(f"--ckpt_path: {problem}: {advice}")

    for config in trainer.lr_scheduler_configs:
        steps = getattr(config.scheduler, "total_steps", None)
        if steps is None or config.interval != "step":
            continue
        if steps * config.frequency < trainer.max_steps:
            schedule = type(config.scheduler).__name__
            problem = f"{schedule} would end before the {trainer.max_steps} steps of the training"
            raise InputError(f"--lr_scheduler.total_steps {steps}: {problem}")
