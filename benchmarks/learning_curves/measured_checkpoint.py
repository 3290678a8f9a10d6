"""The checkpoints of a training of the grid: of each measured step, and the last one, which never lacks its row."""

import pytorch_lightning as pl

from lit_knn.callbacks.last_checkpoint import LastCheckpoint
from lit_knn.common.checkpoint_file import LAST_NAME


class MeasuredCheckpoint(LastCheckpoint):
    """Keep `last.ckpt`, but save at the step of a measurement only after it. Keep that step's, too, as `step=N.ckpt`.

    A resumed training does not measure the step that it starts from, so a checkpoint from before the measurement would
    lose its row.

    Args:
        measured_every: optimiser steps between measurements. Between two of them are three saves.
        dirpath: folder of the checkpoint.
    """

    def __init__(self, measured_every: int, dirpath: str) -> None:
        super().__init__(max(measured_every // 4, 1), dirpath)
        self.measured_every = measured_every
        self._measured_step = -1

    def save(self, trainer: pl.Trainer, name: str = LAST_NAME) -> None:
        """Save `last.ckpt`, unless the measurement at this step has not ended."""
        is_measured = trainer.global_step % self.measured_every == 0
        if not is_measured or trainer.global_step == self._measured_step:
            super().save(trainer, name)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save `last.ckpt`, because the row is complete, and keep these weights."""
        self._measured_step = trainer.global_step
        self.save(trainer)
        super().save(trainer, f"step={trainer.global_step}.ckpt")
