"""The optimiser and the schedule of a resumed run: their classes are those of the checkpoint.

Their options are those of the new run, but for those that a schedule sets.
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
    """Refuses a checkpoint of another optimiser or schedule, and keeps the options of this run."""

    def __init__(self) -> None:
        self._saved_classes: Mapping[str, object] = {}
        self._saved_groups: list[ParameterGroup] = []
        self._options: list[ParameterGroup] = []

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Note the classes and options of the checkpoint: Lightning has no optimiser yet."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._saved_classes = checkpoint.get(RUN_KEY, {})
        self._saved_groups = []
        for state in checkpoint["optimizer_states"]:
            self._saved_groups += state["param_groups"]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the optimiser, and copy its options before Lightning loads the checkpoint's."""
        check_optimisation(trainer, self._saved_classes, self._saved_groups)
        self._options = []
        for group in parameter_groups(trainer):
            self._options.append({name: group[name] for name in group if name != "params"})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the optimiser the options of this run, but for those that a schedule sets."""
        scheduled = SCHEDULED if trainer.lr_scheduler_configs else set()
        for group, options in zip(parameter_groups(trainer), self._options, strict=True):
            for name, value in options.items():
                if name not in scheduled:
                    group[name] = value


def parameter_groups(trainer: pl.Trainer) -> list[ParameterGroup]:
    """Return the parameter groups of all optimisers, which hold their options."""
    groups: list[ParameterGroup] = []
    for optimizer in trainer.optimizers:
        groups += optimizer.param_groups
    return groups


def optimisation(trainer: pl.Trainer) -> dict[str, str]:
    """Return the classes of optimiser and schedule, and the length of the schedule.

    A checkpoint holds their states.
    """
    schedules = []
    for config in trainer.lr_scheduler_configs:
        schedule = type(config.scheduler).__name__
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
    """Refuse other optimisers, schedules or rates than the checkpoint's, and a schedule too short.

    Args:
        trainer: the trainer of the run, with its optimisers.
        before: the `optimisation` of the run that wrote the checkpoint; empty for a new run.
        groups: the parameter groups of the checkpoint, with their rates.
    """
    advice = "give the same, or start a new run"
    for name, now in optimisation(trainer).items():
        if before.get(name, now) != now:
            problem = f"the checkpoint has the state of {name} {before[name]}, not of {now}"
            raise InputError(f"--ckpt_path: {problem}: {advice}")

    # A new run has no saved groups.
    for saved, group in zip(groups, parameter_groups(trainer), strict=False):
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
