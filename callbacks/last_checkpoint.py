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

    An end by Ctrl-C or SIGTERM counts, too. So does an error in a run of a single process, unless the
    error came in the middle of a step.

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
        self._whole = False  # True if no gradients wait for their step, and no step is half done.

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the states of all callbacks can be read again from a checkpoint."""
        super().on_train_start(trainer, pl_module)
        # The current step counts as saved, so an error before the next one saves nothing: other callbacks
        # may not have taken their states from the checkpoint yet.
        self._saved_step = trainer.global_step
        self._whole = True

        # Lightning calls checkpoint callbacks after the others, so all others have their states by now.
        checkpoint_io = trainer.strategy.checkpoint_io
        if isinstance(checkpoint_io, WholeCheckpointIO):
            checkpoint_io.owners = owners_of(trainer)
            check_states(trainer, checkpoint_io.owners)

    def check_overwrites(self, trainer: pl.Trainer, step: int, start: str | None) -> None:
        """Raise InputError if this run would overwrite the checkpoint of a longer one.

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
        """Save `last.ckpt`, and note the step."""
        # The step is noted first, so that a save that fails is not tried again at the same step.
        self._saved_step = trainer.global_step
        super().save(trainer, name)

    def name_of_file(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        """Return `last.ckpt` every `every_n_steps` steps and at the last step, or else None.

        At this moment the module has the current weights. Only a later callback puts averages in their place.
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
        """Note that the weights change from now on, so that the training cannot be saved."""
        self._whole = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        # If no step has ended, gradients wait for their step, and a checkpoint would lose them.
        self._whole = trainer.global_step > self._step
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if a callback has stopped the run since the last batch, and this step is not saved yet."""
        if trainer.should_stop and self._saved_step != trainer.global_step:
            self.save(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save before a validation, so that nothing is lost if somebody interrupts it."""
        if self._is_between_steps(trainer) and self._saved_step != trainer.global_step:
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save again after a validation, because callbacks keep results of it, such as the best value."""
        if self._is_between_steps(trainer) and self._saved_step == trainer.global_step:
            self.save(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save if the error came between two steps of a training with a single process.

        With several processes nothing is saved, because all of them would have to take part, and the error may have
        ended only one.
        """
        is_unsaved = trainer.global_step > self._saved_step
        can_save = self._whole and trainer.training and is_unsaved
        if trainer.world_size > 1 or not can_save:
            return

        try:
            self.save(trainer)
        # Raised, this error would hide the one that ended the training.
        except (InputError, NonFiniteLossError) as error:
            rank_zero_warn(str(error))

    def _is_between_steps(self, trainer: pl.Trainer) -> bool:
        """Return whether a training is between two steps, and not in the sanity check before it."""
        return self._whole and trainer.state.fn == "fit" and not trainer.sanity_checking
