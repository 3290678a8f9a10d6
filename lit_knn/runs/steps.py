"""Bases of callbacks that act after optimiser steps of a training. A step may take several batches."""

import pytorch_lightning as pl


class StepCallback(pl.Callback):
    """Calls `on_step_end` after each batch that ends an optimiser step.

    With `accumulate_grad_batches` the other batches only add to the gradients.
    """

    _step = 0

    def on_step_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do what the subclass does after each step."""
        raise NotImplementedError

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.on_step_end(trainer, pl_module)


class IntervalCallback(StepCallback):
    """Calls `at_interval` after every `log_every_n_steps` steps, when a training logs its values."""

    def at_interval(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do what the subclass does at the end of each interval."""
        raise NotImplementedError

    def on_step_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.at_interval(trainer, pl_module)
