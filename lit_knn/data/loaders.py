"""The batches of a data module, gathered from its reference sets."""

from collections.abc import Callable
from typing import cast

import pytorch_lightning as pl
import torch
from torch import Tensor

from lit_knn.common.memory import to_device
from lit_knn.data.batches import Batch, ReferenceBatches, SeedBatches
from lit_knn.reference import ReferenceSet


class ReferenceLoaders(pl.LightningDataModule):
    """Gives the trainer batches of the reference sets that a subclass makes in `setup`.

    `ReferenceDataModule` explains the options.
    """

    batch_size: int
    seed: int
    predict_samples: int
    val_images: int
    # The images to train on, and those held out, after `setup`.
    reference: ReferenceSet | None = None
    held_out_reference: ReferenceSet | None = None

    def transfer_batch_to_device(
        self, batch: Tensor | Batch, device: torch.device, dataloader_idx: int
    ) -> Tensor | Batch:
        """Move only the images. With labels on the CPU, `ByClass` finds a class's rows without waiting for a GPU."""
        if isinstance(batch, Tensor):
            return to_device(batch, device)
        images, labels = batch
        return to_device(images, device), labels

    def train_dataloader(self) -> ReferenceBatches:
        """Return shuffled batches of all images. A resumed run continues at the batch where it stopped."""
        trainer = self.trainer
        if trainer is None:
            return self._batches()
        # Every epoch then has the same few batches, so the number within the epoch tells which one is next.
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            progress = trainer.fit_loop.epoch_loop.batch_progress
            return self._batches(shuffle=False, batches_done=lambda: progress.current.ready)
        return self._batches(
            accumulate=trainer.accumulate_grad_batches,
            batches_done=lambda: cast(int, trainer.lightning_module.batches_done),
        )

    def val_dataloader(self) -> ReferenceBatches:
        """Return batches of `val_images` images, the same every time; they are held-out ones, if there are any."""
        return self._batches(self.held_out_reference, shuffle=False, num_images=self.val_images)

    def predict_dataloader(self) -> SeedBatches:
        """Return batches of seeds, one seed for each sample to generate."""
        return SeedBatches(self.predict_samples, self.batch_size, *self._rank_and_world_size())

    def _batches(
        self,
        images: ReferenceSet | None = None,
        shuffle: bool = True,
        num_images: int | None = None,
        accumulate: int = 1,
        batches_done: Callable[[], int] = lambda: 0,
    ) -> ReferenceBatches:
        """Return batches of `images`, by default of the reference set; see `ReferenceBatches`."""
        assert self.reference is not None, "call setup() before asking for batches"
        rank, world_size = self._rank_and_world_size()
        return ReferenceBatches(
            images or self.reference,
            self.batch_size,
            seed=self.seed,
            shuffle=shuffle,
            num_images=num_images,
            rank=rank,
            world_size=world_size,
            accumulate=accumulate,
            batches_done=batches_done,
        )

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks: (0, 1) without a trainer."""
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size
