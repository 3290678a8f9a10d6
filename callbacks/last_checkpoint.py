"""Keep the last checkpoint, so that a run can resume."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn
from torch.optim import Optimizer

from lit_knn.callbacks.finite_checkpoint import FiniteCheckpoint
from lit_knn.common.checkpoint_file import LAST_NAME
from lit_knn.common.errors import InputError, NonFiniteLossError
from lit_knn.runs.checkpoint_io import read_training
from lit_knn.runs.interruption import stop_signal
from lit_knn.runs.run import is_end_of_training


class LastCheckpoint(FiniteCheckpoint):
    """Keep `last.ckpt`: save every `every_n_steps` steps, around validations, at the end, and when interrupted.

    Ctrl-C and SIGTERM are interruptions. With a single process an error is one, too, unless it cut a step in two.

    Args:
        every_n_steps: optimiser steps between saves; a crash loses at most these.
        dirpath: folder of the checkpoint; by default `checkpoints/` in the run's folder.
    """

    def __init__(self, every_n_steps: int = 1000, dirpath: str | None = None) -> None:
        if every_n_steps < 1:
            raise InputError(f"LastCheckpoint: every_n_steps must be at least 1, got {every_n_steps}")
        super().__init__(
            dirpath=dirpath,
            filename=Path(LAST_NAME).stem,
            every_n_train_steps=1,
            enable_version_counter=False,
            save_on_exception=True,
        )
        self.every_n_steps = every_n_steps
        self._inside_step = False

    def check_overwrites(self, trainer: pl.Trainer, step: int) -> None:
        """Raise InputError if this run, which starts at `step`, would overwrite a longer one."""
        folder = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints")
        path = folder / LAST_NAME
        if not path.exists():
            return
        advice = "resume from it with --ckpt_path, move it, or give another folder or logger version"
        try:
            saved = read_training(path, mmap=True)["global_step"]
        except InputError as error:
            raise InputError(f"{error}; this run would overwrite it: move it, or give another folder") from error
        if saved > step:
            raise InputError(f"{path} has {saved} steps, and this run, from step {step}, would overwrite it: {advice}")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note that the weights do not change yet."""
        self._inside_step = False

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Note that from now on the weights change."""
        self._inside_step = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Save if it is time. The last save is at the last batch, before averaged weights replace the current ones."""
        step = trainer.global_step
        ends = trainer.should_stop or is_end_of_training(trainer) or stop_signal(trainer)
        if (step % self.every_n_steps == 0 or ends) and not self.is_accumulating(trainer):
            super().on_train_batch_end(trainer, pl_module, *args)
        self._inside_step = False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save before a validation, which may be long, so that one can interrupt it; a resumed run repeats it."""
        if not self._should_skip_saving_checkpoint(trainer) and not self.is_accumulating(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save again after a validation, so that a resumed run does not repeat it."""
        saved_before = self.last_saved is not None and self._last_global_step_saved == trainer.global_step
        if saved_before and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save_checkpoint(trainer, self.best_model_path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save on an error in training, unless it cut a step in two.

        Saving needs all ranks, and an error may happen on one alone.
        """
        if trainer.world_size > 1 or not trainer.training:
            return
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        accumulated = batches.processed % trainer.accumulate_grad_batches != 0
        if self._inside_step or accumulated or trainer.global_step == 0:
            return
        try:
            super().on_exception(trainer, pl_module, exception)
        except (InputError, NonFiniteLossError) as error:  # The first error is the one to report.
            rank_zero_warn(str(error))
