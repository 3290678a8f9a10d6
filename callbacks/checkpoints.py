"""Checkpoints after steps of a training, such as one at each multiple of a number of images."""

from pathlib import Path
from typing import cast

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.callbacks import Checkpoint

from lit_knn.common.checkpoint_file import CHECKPOINTS, kept_in
from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.common.files import make_folder
from lit_knn.modules.base import EstimatorTraining
from lit_knn.runs.names import expanded


def images_seen(pl_module: pl.LightningModule) -> int:
    """Return how many images a training module of this project has seen, over all ranks."""
    return cast(EstimatorTraining, pl_module).images_seen


class StepCheckpoint(Checkpoint):
    """Saves after an optimiser step, but nothing if a weight is not finite.

    So the last good checkpoint stays. A subclass implements `name_of_file`. Lightning's
    `ModelCheckpoint` saves weights that are not finite, too; it counts steps and no images, does
    not save when a signal or a callback ends the run, and after an error all ranks would have to
    save.

    Args:
        dirpath: the folder, by default `checkpoints/` in the run's folder.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.last_saved: str | None = None  # the checkpoint that this run saved last
        self._step = 0

    def name_of_file(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        """Return the name of the file that this step asks for, or None."""
        raise NotImplementedError

    def folder(self, trainer: pl.Trainer) -> Path:
        """Return the folder of the checkpoints."""
        if self.dirpath:
            return expanded(self.dirpath)
        return Path(trainer.log_dir or trainer.default_root_dir) / CHECKPOINTS

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the folder before the training: a checkpoint may be saved only after hours."""
        if stage != "fit":
            return
        # All ranks ask, because Lightning's `log_dir` is a broadcast.
        folder = self.folder(trainer)
        self.dirpath = str(folder)
        on_first_rank(lambda: make_folder(folder))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        self.last_saved = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        """Save if the batch ended a step that asks for it; other batches only add gradients."""
        if trainer.global_step <= self._step:
            return
        self._step = trainer.global_step
        name = self.name_of_file(trainer, pl_module)
        if name is not None:
            self.save(trainer, name)

    def save(self, trainer: pl.Trainer, name: str) -> None:
        """Save the training as it is; all ranks must call this."""
        # `--ckpt_path last` would find the checkpoint of this trial.
        if getattr(trainer, "fast_dev_run", False):
            return

        path = str(Path(str(self.dirpath)) / name)
        module = trainer.lightning_module
        if all(weight.isfinite().all() for weight in module.parameters()):
            trainer.save_checkpoint(path, weights_only=False)
            self.last_saved = path
            return

        if isinstance(module, EstimatorTraining):
            # On a GPU the value that spoilt them may not have been told yet.
            module.checks.raise_first()
        problem = f"the weights are not finite at step {trainer.global_step}"
        rank_zero_warn(f"{problem}; {path} is not written")


class CheckpointByImages(StepCheckpoint):
    """Keep a checkpoint each time the images seen in training pass a multiple of `every_n_images`.

    `lit-knn best --run RUN` measures all of them.

    Args:
        every_n_images: images between checkpoints; 2.5 million in the paper.
        dirpath: folder of the checkpoints; by default `checkpoints/` in the run's folder.
    """

    def __init__(self, every_n_images: int = 2_500_000, dirpath: str | None = None) -> None:
        with prefixed("CheckpointByImages"):
            check_at_least(1, every_n_images=every_n_images)
        super().__init__(dirpath)
        self.every_n_images = every_n_images
        self._passed = 0

    def check_overwrites(self, trainer: pl.Trainer, step: int, start: str | None) -> None:
        """Raise InputError if a new run would add to the kept checkpoints of another one.

        Args:
            trainer: the trainer of this run.
            step: the step that it starts from.
            start: the checkpoint that it starts from, or None.
        """
        if step > 0:
            return
        folder = self.folder(trainer)
        if kept_in(folder):
            problem = f"{folder} has checkpoints of another training"
            raise InputError(f"CheckpointByImages: {problem}; give another dirpath")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._passed = images_seen(pl_module) // self.every_n_images

    def name_of_file(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        """Name the file by the images seen if they passed a multiple."""
        passed_before = self._passed
        self._passed = images_seen(pl_module) // self.every_n_images
        if self._passed <= passed_before:
            return None
        return f"images_seen={images_seen(pl_module)}.ckpt"
