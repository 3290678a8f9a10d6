"""Callbacks that save checkpoints after steps of a training, such as at each multiple of a number of images."""

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
from lit_knn.runs.steps import StepCallback


def images_seen(pl_module: pl.LightningModule) -> int:
    """Return how many images a training module of this project has seen, over all ranks."""
    return cast(EstimatorTraining, pl_module).images_seen


def passed_multiple(pl_module: pl.LightningModule, every_n_images: int) -> bool:
    """Return whether the images seen have passed a multiple of `every_n_images` in the step that has just ended."""
    module = cast(EstimatorTraining, pl_module)
    before = module.images_seen - module.images_of_step
    return module.images_seen // every_n_images > before // every_n_images


class StepCheckpoint(StepCallback, Checkpoint):
    """Base of the callbacks that save a checkpoint after some of the optimiser steps.

    Nothing is saved if a weight is not finite, so the last good checkpoint stays. A subclass
    implements `name_of_file`, which chooses the steps.

    Lightning's `ModelCheckpoint` does not serve here: it saves weights that are not finite, too; it
    counts steps, not images; it does not save when a signal or a callback ends the run; and to save
    after an error, it needs all ranks.

    Args:
        dirpath: the folder, by default `checkpoints/` in the run's folder.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.last_saved: str | None = None  # the checkpoint that this run saved last

    def name_of_file(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        """Return the name of the checkpoint to save after the current step, or None to save nothing."""
        raise NotImplementedError

    def folder(self, trainer: pl.Trainer) -> Path:
        """Return the folder of the checkpoints."""
        if self.dirpath:
            return expanded(self.dirpath)
        return Path(trainer.log_dir or trainer.default_root_dir) / CHECKPOINTS

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the folder before the training, because the first checkpoint may come only after hours."""
        if stage != "fit":
            return
        # Every rank must read Lightning's `log_dir`, which `folder` does, because reading it is a collective operation.
        folder = self.folder(trainer)
        self.dirpath = str(folder)
        on_first_rank(lambda: make_folder(folder))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.last_saved = None

    def on_step_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save a checkpoint if `name_of_file` names a file for this step."""
        name = self.name_of_file(trainer, pl_module)
        if name is not None:
            self.save(trainer, name)

    def save(self, trainer: pl.Trainer, name: str) -> None:
        """Save a checkpoint of the training under this name, or warn if a weight is not finite.

        All ranks must call this.
        """
        # A trial (`fast_dev_run`) saves nothing, because `--ckpt_path last` would find its checkpoint.
        if getattr(trainer, "fast_dev_run", False):
            return

        path = str(Path(str(self.dirpath)) / name)
        module = trainer.lightning_module
        if all(weight.isfinite().all() for weight in module.parameters()):
            trainer.save_checkpoint(path, weights_only=False)
            self.last_saved = path
            return

        if isinstance(module, EstimatorTraining):
            # Called for the error that it raises: on a GPU, the module may not have reported the bad value yet.
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

    def check_overwrites(self, trainer: pl.Trainer, step: int, start: str | None) -> None:
        """Raise InputError if a new training would add to the kept checkpoints of another one.

        Args:
            trainer: the trainer of this run.
            step: the step that it starts from; 0 for a new training.
            start: the checkpoint that it starts from, or None.
        """
        if step > 0:
            return
        folder = self.folder(trainer)
        if kept_in(folder):
            problem = f"{folder} has checkpoints of another training"
            raise InputError(f"CheckpointByImages: {problem}; give another dirpath")

    def name_of_file(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        """Return a name with the images seen if this step passed a multiple of `every_n_images`, or else None."""
        if passed_multiple(pl_module, self.every_n_images):
            return f"images_seen={images_seen(pl_module)}.ckpt"
        return None
