"""Save checkpoints at regular numbers of images seen."""

from typing import Any

import pytorch_lightning as pl

from lit_knn.callbacks.finite_checkpoint import FiniteCheckpoint
from lit_knn.common.errors import InputError


class CheckpointByImages(FiniteCheckpoint):
    """Keep a checkpoint each time the images seen in training pass a multiple of `every_n_images`.

    `lit-knn best --run RUN` measures all of them.

    Args:
        every_n_images: images between checkpoints; 2.5 million in the paper.
        dirpath: folder of the checkpoints; by default `checkpoints/` in the run's folder.
    """

    def __init__(self, every_n_images: int = 2_500_000, dirpath: str | None = None) -> None:
        if every_n_images < 1:
            raise InputError(f"CheckpointByImages: every_n_images must be at least 1, got {every_n_images}")
        super().__init__(dirpath=dirpath, filename="{images_seen:.0f}", save_top_k=-1, every_n_train_steps=1)
        self.every_n_images = every_n_images
        self._passed = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from the images of the checkpoint that the run resumes from."""
        super().on_train_start(trainer, pl_module)
        self._passed = _images_seen(pl_module) // self.every_n_images

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Save if the images seen passed a multiple of `every_n_images` since the last save."""
        passed = _images_seen(pl_module) // self.every_n_images
        if passed > self._passed and not self.is_accumulating(trainer):
            self._passed = passed
            super().on_train_batch_end(trainer, pl_module, *args)


def _images_seen(pl_module: pl.LightningModule) -> int:
    return int(pl_module.images_seen)  # type: ignore[arg-type]
