"""Save only checkpoints with finite weights."""

from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_warn

from lit_knn.common.distributed import on_first_rank
from lit_knn.modules.base import EstimatorTraining
from lit_knn.runs.run import make_folder


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
