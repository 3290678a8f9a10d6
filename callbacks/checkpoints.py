"""Checkpoints: every so many images, and always the last."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lit_knn.errors import InputError


class FiniteCheckpoint(ModelCheckpoint):
    """Saves nothing once a weight is not finite, so that the last good checkpoint stays."""

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        weights = trainer.lightning_module.parameters()
        if all(weight.isfinite().all() for weight in weights):
            super()._save_checkpoint(trainer, filepath)
        else:
            rank_zero_warn(f"the weights are not finite at step {trainer.global_step}; {filepath} is not written")


class CheckpointByImages(FiniteCheckpoint):
    """Keep a checkpoint each time the images seen in training pass a multiple of `every_n_images`.

    `python main.py best --run RUN` measures all of them.

    Args:
        every_n_images: the paper checkpoints every 2.5 million.
        dirpath: where to; by default `checkpoints/` in the run's folder.
    """

    def __init__(self, every_n_images: int = 2_500_000, dirpath: str | None = None) -> None:
        if every_n_images < 1:
            raise InputError(f"CheckpointByImages: every_n_images must be at least 1, got {every_n_images}")
        super().__init__(dirpath=dirpath, filename="{images_seen:.0f}", save_top_k=-1, every_n_train_steps=1)
        self.every_n_images = every_n_images
        self._passed = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A resumed run has passed what its checkpoint has."""
        super().on_train_start(trainer, pl_module)
        self._passed = _images_seen(pl_module) // self.every_n_images

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Save if a multiple was passed since the last save."""
        passed = _images_seen(pl_module) // self.every_n_images
        if passed > self._passed and not _is_accumulating(trainer):
            self._passed = passed
            super().on_train_batch_end(trainer, pl_module, *args)


class LastCheckpoint(FiniteCheckpoint):
    """Keep `last.ckpt`: every `every_n_steps` steps, at the end of training, and when it is interrupted.

    Ctrl-C and SIGTERM are interruptions; with a single process errors are, too.

    Args:
        every_n_steps: optimiser steps between saves; what an unexpected end can cost at most.
        dirpath: where to; by default `checkpoints/` in the run's folder.
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
        """Save when due; at the last batch rather than after it, when averaged weights have replaced the current."""
        step = trainer.global_step
        ends = trainer.should_stop or step == trainer.max_steps or _is_last_batch(trainer)
        if (step % self.every_n_steps == 0 or ends) and not _is_accumulating(trainer):
            super().on_train_batch_end(trainer, pl_module, *args)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save on an interruption, but not in a validation, where averaged weights stand in for the current.

        Saving takes all ranks. An interruption reaches every one of them; an error may be one rank's alone.
        """
        everywhere = trainer.world_size == 1 or isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        if everywhere and trainer.training and trainer.global_step > 0:
            super().on_exception(trainer, pl_module, exception)


def _images_seen(pl_module: pl.LightningModule) -> int:
    return int(pl_module.images_seen)  # type: ignore[arg-type]


def _is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether this batch only added to the gradient of a step to come."""
    return trainer.fit_loop._should_accumulate()


def _is_last_batch(trainer: pl.Trainer) -> bool:
    return trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
