"""Save only checkpoints with finite weights."""

import os
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_warn

from lit_knn.distributed import on_first_rank
from lit_knn.errors import InputError, first_line
from lit_knn.training.base import EstimatorTraining


class FiniteCheckpoint(ModelCheckpoint):
    """Saves nothing once a weight is not finite, so that the last good checkpoint stays."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the folder before training, because a checkpoint may be saved only after hours."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            on_first_rank(lambda: make_folder(Path(str(self.dirpath))))

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        weights = trainer.lightning_module.parameters()
        if all(weight.isfinite().all() for weight in weights):
            super()._save_checkpoint(trainer, filepath)
        else:
            # On a GPU the value that spoilt them may not have been told yet.
            if isinstance(trainer.lightning_module, EstimatorTraining):
                trainer.lightning_module.checks.raise_first()
            rank_zero_warn(f"the weights are not finite at step {trainer.global_step}; {filepath} is not written")

    @property
    def last_saved(self) -> str | None:
        """The checkpoint that this run saved last, or None."""
        return self._last_checkpoint_saved or None

    @staticmethod
    def is_accumulating(trainer: pl.Trainer) -> bool:
        """Tells whether this batch only added gradients for a later step."""
        return trainer.fit_loop._should_accumulate()


def make_folder(folder: Path) -> None:
    """Make a folder of checkpoints; raise InputError if it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: no folder of checkpoints can be made: {first_line(error)}") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder}: checkpoints cannot be written there")


def is_end_of_training(trainer: pl.Trainer) -> bool:
    """Tell whether this step is the last one that the options ask for."""
    last_batch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or last_batch
