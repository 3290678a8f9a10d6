"""Save only checkpoints with finite weights."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_warn


class FiniteCheckpoint(ModelCheckpoint):
    """Saves nothing once a weight is not finite, so that the last good checkpoint stays."""

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        weights = trainer.lightning_module.parameters()
        if all(weight.isfinite().all() for weight in weights):
            super()._save_checkpoint(trainer, filepath)
        else:
            rank_zero_warn(f"the weights are not finite at step {trainer.global_step}; {filepath} is not written")

    @property
    def last_saved(self) -> str | None:
        """The checkpoint that this run saved last, or None."""
        return self._last_checkpoint_saved or None

    @staticmethod
    def is_accumulating(trainer: pl.Trainer) -> bool:
        """Tells whether this batch only added gradients for a later step."""
        return trainer.fit_loop._should_accumulate()
