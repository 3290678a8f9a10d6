"""The last checkpoint of a training, from which it can go on after any end."""

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lit_knn.callbacks.checkpoints import StepCheckpoint
from lit_knn.common.checkpoint_file import LAST_NAME
from lit_knn.common.errors import InputError, NonFiniteLossError, check_at_least, prefixed
from lit_knn.runs.checkpoints import WholeCheckpointIO, read_training
from lit_knn.runs.interruption import stop_signal
from lit_knn.runs.owners import owners_of
from lit_knn.runs.states import check_states


class LastCheckpoint(StepCheckpoint):
    """Keep `last.ckpt`: save every `every_n_steps` steps, around validations, and at the end.

    An interruption is an end: Ctrl-C and SIGTERM, and with a single process an error, unless it
    cut a step in two.

    Args:
        every_n_steps: optimiser steps between saves; a crash loses at most these.
        dirpath: folder of the checkpoint; by default `checkpoints/` in the run's folder.
    """

    def __init__(self, every_n_steps: int = 1000, dirpath: str | None = None) -> None:
        with prefixed("LastCheckpoint"):
            check_at_least(1, every_n_steps=every_n_steps)
        super().__init__(dirpath)
        self.every_n_steps = every_n_steps
        self._saved_step = -1
        self._whole = False  # True if no gradients are open and no step is half done.

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the states of all callbacks can be read again from a checkpoint."""
        super().on_train_start(trainer, pl_module)
        # An error before the first step saves nothing: the callbacks may not have taken the
        # checkpoint's state.
        self._saved_step, self._whole = trainer.global_step, True

        # This callback is behind the others, whose states are there now.
        checkpoint_io = trainer.strategy.checkpoint_io
        if isinstance(checkpoint_io, WholeCheckpointIO):
            checkpoint_io.owners = owners_of(trainer)
            check_states(trainer, checkpoint_io.owners)

    def check_overwrites(self, trainer: pl.Trainer, step: int, start: str | None) -> None:
        """Raise InputError if this run would overwrite a longer one.

        Args:
            trainer: the trainer of this run.
            step: the step that it starts from.
            start: the checkpoint that it starts from, or None.
        """
        path = self.folder(trainer) / LAST_NAME
        if not path.exists() or (start is not None and path.samefile(start)):
            return

        with prefixed("this run would overwrite a checkpoint"):
            saved = read_training(path)["global_step"]
        if saved > step:
            problem = f"{path} has {saved} steps, and this run, from step {step}, would overwrite"
            advice = "resume from it with --ckpt_path"
            where = "move its run's folder, or give another logger version"
            raise InputError(f"{problem} it: {advice}, {where}")

    def save(self, trainer: pl.Trainer, name: str = LAST_NAME) -> None:
        self._saved_step = trainer.global_step  # A save that fails is not tried again.
        super().save(trainer, name)

    def name_of_file(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        """Ask for a file every `every_n_steps` steps and at the last.

        The weights are still the current ones; averages replace them later.
        """
        is_last_batch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        is_last_step = trainer.global_step == trainer.max_steps
        ends = trainer.should_stop or is_last_batch or is_last_step or stop_signal(trainer)
        if ends or trainer.global_step % self.every_n_steps == 0:
            return LAST_NAME
        return None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        """From now on the weights change."""
        self._whole = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: object
    ) -> None:
        self._whole = trainer.global_step > self._step
        super().on_train_batch_end(trainer, pl_module, *args)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if a callback has stopped the run since the batch."""
        if trainer.should_stop and self._saved_step != trainer.global_step:
            self.save(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save before a validation, which may be long, so that one can interrupt it."""
        if self._is_between_steps(trainer) and self._saved_step != trainer.global_step:
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save again after a validation, with what callbacks keep of it, as the best value."""
        if self._is_between_steps(trainer) and self._saved_step == trainer.global_step:
            self.save(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save on an error in training between two steps.

        Saving needs all ranks, and an error may be of one alone.
        """
        between = self._whole and trainer.training and trainer.global_step > self._saved_step
        if trainer.world_size > 1 or not between:
            return

        try:
            self.save(trainer)
        except (InputError, NonFiniteLossError) as error:  # The first error is the one to report.
            rank_zero_warn(str(error))

    def _is_between_steps(self, trainer: pl.Trainer) -> bool:
        return self._whole and trainer.state.fn == "fit" and not trainer.sanity_checking
