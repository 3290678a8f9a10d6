"""Show one progress bar over the whole run."""

import sys
from contextlib import suppress

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar

from lit_knn.common.progress import SECONDS_BETWEEN_LINES_IN_A_FILE


class StepProgressBar(TQDMProgressBar):
    """Count optimiser steps to `max_steps`, with the time left, instead of batches within an epoch.

    With small data sets an epoch takes seconds, and a run has thousands of them.
    """

    def on_train_start(self, trainer: pl.Trainer, *_: object) -> None:
        """Make the bar count the steps of the whole run. In a resumed run it begins at the step that was reached."""
        super().on_train_start()
        bar = self.train_progress_bar
        total = trainer.max_steps if trainer.max_steps > 0 else None
        bar.reset(total=total)
        # `n` is the step that the bar shows. tqdm takes the rate and the time left from n - initial,
        # so they count the steps of this session alone.
        bar.n = trainer.global_step
        bar.initial = trainer.global_step
        bar.set_description("Training")
        if not sys.stdout.isatty():
            bar.mininterval = SECONDS_BETWEEN_LINES_IN_A_FILE

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: object) -> None:
        """Do nothing, so that the bar does not start again at each epoch as Lightning's does."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do nothing, so that the bar keeps its values at the end of an epoch."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        """Move the bar if the batch ended a step."""
        bar = self.train_progress_bar
        if trainer.global_step <= bar.n:
            return

        # Reading a value waits for the GPU, so on a GPU the shown values change only when they are logged.
        is_logged = trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if is_logged or pl_module.device.type != "cuda":
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
        bar.update(trainer.global_step - bar.n)

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the values that the bar shows: Lightning's, and the loss of the latest batch.

        The loss is not logged with `prog_bar=True`, because Lightning would then read it after each batch.
        """
        shown = super().get_metrics(trainer, pl_module)
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None:
            shown["train/loss"] = loss.item()
        # Lightning shows the last four letters of the run's version, which would say nothing here.
        shown.pop("v_num", None)
        return shown

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the bars on the screen, so that the message of the error gets a line of its own."""
        for name in ("val_progress_bar", "predict_progress_bar", "train_progress_bar"):
            with suppress(TypeError):  # Lightning raises it if the run has no such bar.
                getattr(self, name).close()
