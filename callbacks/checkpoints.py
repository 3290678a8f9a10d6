"""The checkpoints of a training: the last one, and one at each multiple of a number of images."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.utilities import rank_zero_warn

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME, kept_in
from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, NonFiniteLossError, check_at_least, prefixed
from lit_knn.common.files import make_folder
from lit_knn.modules.base import EstimatorTraining
from lit_knn.runs.checkpoints import WholeCheckpointIO, read_training
from lit_knn.runs.folder_choice import expanded
from lit_knn.runs.interruption import stop_signal
from lit_knn.runs.states import check_states, owners_of


class StepCheckpoint(Checkpoint):
    """Saves after an optimiser step, but nothing if a weight is not finite. So the last good checkpoint stays.

    A subclass implements `name_of_file`. `dirpath` is the folder, by default `checkpoints/` in the run's folder.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.last_saved: str | None = None  # the checkpoint that this run saved last
        self._step = 0

    def name_of_file(self, trainer: pl.Trainer, pl_module: Any) -> str | None:
        """Return the name of the file that this step asks for, or None."""
        raise NotImplementedError

    def folder(self, trainer: pl.Trainer) -> Path:
        """Return the folder of the checkpoints."""
        own = self.dirpath
        return (
            expanded(own)
            if own
            else Path(trainer.log_dir or trainer.default_root_dir) / CHECKPOINTS
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the folder before the training, because a checkpoint may be saved only after hours."""
        if stage == "fit":
            # All ranks ask, because Lightning's `log_dir` is a broadcast.
            folder = self.folder(trainer)
            self.dirpath = str(folder)
            on_first_rank(lambda: make_folder(folder))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        self.last_saved = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Save if the batch ended a step that asks for it; other batches only add gradients."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if name := self.name_of_file(trainer, pl_module):
                self.save(trainer, name)

    def save(self, trainer: pl.Trainer, name: str) -> None:
        """Save the training as it is; all ranks must call this."""
        # `--ckpt_path last` would find the checkpoint of this trial.
        if getattr(trainer, "fast_dev_run", False):
            return
        path, module = str(Path(str(self.dirpath)) / name), trainer.lightning_module
        if all(weight.isfinite().all() for weight in module.parameters()):
            trainer.save_checkpoint(path, weights_only=False)
            self.last_saved = path
            return
        if isinstance(module, EstimatorTraining):
            # On a GPU the value that spoilt them may not have been told yet.
            module.checks.raise_first()
        rank_zero_warn(
            f"the weights are not finite at step {trainer.global_step}; {path} is not written"
        )


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
        """Raise InputError if a new run would add to the kept checkpoints of another one."""
        if step == 0 and kept_in(folder := self.folder(trainer)):
            raise InputError(
                f"CheckpointByImages: {folder} has checkpoints of another training; give another dirpath"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._passed = pl_module.images_seen // self.every_n_images

    def name_of_file(self, trainer: pl.Trainer, pl_module: Any) -> str | None:
        """Name the file by the images seen if they passed a multiple."""
        before, self._passed = self._passed, pl_module.images_seen // self.every_n_images
        return f"images_seen={pl_module.images_seen}.ckpt" if self._passed > before else None


class LastCheckpoint(StepCheckpoint):
    """Keep `last.ckpt`: save every `every_n_steps` steps, around validations, at the end, and when interrupted.

    Ctrl-C and SIGTERM are interruptions. With a single process an error is one, too, unless it cut a step in two.

    Args:
        every_n_steps: optimiser steps between saves; a crash loses at most these.
        dirpath: folder of the checkpoint; by default `checkpoints/` in the run's folder.
    """

    def __init__(self, every_n_steps: int = 1000, dirpath: str | None = None) -> None:
        with prefixed("LastCheckpoint"):
            check_at_least(1, every_n_steps=every_n_steps)
        super().__init__(dirpath)
        self.every_n_steps = every_n_steps
        self._saved_step = -1
        self._whole = False  # True if no gradients are open and no step is half done.

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # An error before the first step saves nothing: the callbacks may not have taken the checkpoint's state.
        self._saved_step, self._whole = trainer.global_step, True
        # This callback is behind the others, whose states are there now.
        checkpoint_io = trainer.strategy.checkpoint_io
        if isinstance(checkpoint_io, WholeCheckpointIO):
            checkpoint_io.owners = owners_of(trainer)
            check_states(trainer, checkpoint_io.owners)

    def check_overwrites(self, trainer: pl.Trainer, step: int, start: str | None) -> None:
        """Raise InputError if this run, from `step` and the checkpoint `start`, would overwrite a longer one."""
        path = self.folder(trainer) / LAST_NAME
        if not path.exists() or (start is not None and path.samefile(start)):
            return
        advice = (
            "resume from it with --ckpt_path, move its run's folder, or give another logger version"
        )
        with prefixed("this run would overwrite a checkpoint"):
            saved = read_training(path)["global_step"]
        if saved > step:
            raise InputError(
                f"{path} has {saved} steps, and this run, from step {step}, would overwrite it: {advice}"
            )

    def save(self, trainer: pl.Trainer, name: str = LAST_NAME) -> None:
        self._saved_step = trainer.global_step  # A save that fails is not tried again.
        super().save(trainer, name)

    def name_of_file(self, trainer: pl.Trainer, pl_module: Any) -> str | None:
        """Ask for a file every `every_n_steps` steps and at the last, before averaged weights replace the current."""
        last_batch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        ends = (
            trainer.should_stop
            or last_batch
            or trainer.global_step == trainer.max_steps
            or stop_signal(trainer)
        )
        return LAST_NAME if ends or trainer.global_step % self.every_n_steps == 0 else None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """From now on the weights change."""
        self._whole = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        self._whole = trainer.global_step > self._step
        super().on_train_batch_end(trainer, pl_module, *args)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if a callback has stopped the run since the batch."""
        if trainer.should_stop and self._saved_step != trainer.global_step:
            self.save(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save before a validation, which may be long, so that one can interrupt it."""
        if self._fits(trainer) and self._whole and self._saved_step != trainer.global_step:
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save again after a validation, with what callbacks keep of it, as the best value so far."""
        if self._fits(trainer) and self._whole and self._saved_step == trainer.global_step:
            self.save(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save on an error in training between two steps. Saving needs all ranks, and an error may be of one alone."""
        between = self._whole and trainer.training and trainer.global_step > self._saved_step
        if trainer.world_size > 1 or not between:
            return
        try:
            self.save(trainer)
        except (InputError, NonFiniteLossError) as error:  # The first error is the one to report.
            rank_zero_warn(str(error))

    @staticmethod
    def _fits(trainer: pl.Trainer) -> bool:
        return trainer.state.fn == "fit" and not trainer.sanity_checking
