"""Keep the last checkpoint, so that a run can resume."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import SIGTERMException

from callbacks.finite_checkpoint import FiniteCheckpoint
from lit_knn.errors import InputError


class LastCheckpoint(FiniteCheckpoint):
    """Keep `last.ckpt`: save every `every_n_steps` steps, at the end of training, and on an interruption.

    Ctrl-C and SIGTERM are interruptions; with a single process, errors are, too.

    Args:
        every_n_steps: optimiser steps between saves; a crash loses at most these.
        dirpath: folder of the checkpoint; by default `checkpoints/` in the run's folder.
    """

    def __init__(self, every_n_steps: int = 1000, dirpath: str | None = None) -> None:
        if every_n_steps < 1:
            raise InputError(f"LastCheckpoint: every_n_steps must be at least 1, got {every_n_steps}")
        super().__init__(
            dirpath=dirpath,
            filename="last",
            every_n_train_steps=1,
            enable_version_counter=False,
            save_on_exception=True,
        )
        self.every_n_steps = every_n_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Save if it is time. The last save is at the last batch, before averaged weights replace the current ones."""
        step = trainer.global_step
        ends = trainer.should_stop or step == trainer.max_steps or _is_last_batch(trainer)
        if (step % self.every_n_steps == 0 or ends) and not self.is_accumulating(trainer):
            super().on_train_batch_end(trainer, pl_module, *args)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save on an interruption, except in a validation, where averaged weights replace the current ones.

        Saving needs all ranks. An interruption reaches every rank; an error may happen on one alone.
        """
        everywhere = trainer.world_size == 1 or isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        if everywhere and trainer.training and trainer.global_step > 0:
            super().on_exception(trainer, pl_module, exception)


def _is_last_batch(trainer: pl.Trainer) -> bool:
    return trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
