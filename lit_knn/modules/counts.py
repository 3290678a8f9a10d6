"""Counts the images and batches of a training, which go on over resumed runs."""

from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn

from lit_knn.common.checkpoint_file import Content
from lit_knn.data.batches import split_batch
from lit_knn.runs.resumption import repair_progress

if TYPE_CHECKING:
    from lit_knn.modules.base import EstimatorTraining


class TrainingCounts(pl.Callback):
    """Counts images and batches in the attributes of a module, and saves the counts of whole batches.

    A resumed run repeats an interrupted batch, so the images of that batch must not count twice.

    Args:
        module: the module that is trained.
    """

    def __init__(self, module: "EstimatorTraining") -> None:
        self._module = module
        self._images_of_whole_batches = module.images_seen
        self._step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Go on counting where the trainer is; the counts of a checkpoint are loaded later."""
        if stage == "fit":
            progress = trainer.fit_loop.epoch_loop.batch_progress
            self._module.batches_done = progress.total.processed  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        self._images_of_whole_batches = self._module.images_seen
        self._module.images_of_step = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Add the images of the batch, over all ranks, to those of the training and to those of this optimiser step."""
        module = self._module
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            module.images_of_step = 0

        images = len(split_batch(batch)[0]) * trainer.world_size
        module.images_of_step += images
        module.images_seen += images
        # Lightning would copy a number to the device, but keeps a tensor where it is.
        module.log("train/images_seen", torch.tensor(float(module.images_seen)))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Count the batch. If it ended an optimiser step, this step is done."""
        self._module.batches_done += 1
        self._images_of_whole_batches = self._module.images_seen

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Store the number of steps in the module, for uses of it after the training."""
        self._module.loaded_step = trainer.global_step

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Save the counts of whole batches."""
        checkpoint["images_seen"] = self._images_of_whole_batches
        checkpoint["batches_done"] = self._module.batches_done

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Go on counting where the checkpoint ends. The module has loaded the images."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._module.batches_done = checkpoint["batches_done"]
            repair_progress(checkpoint)
