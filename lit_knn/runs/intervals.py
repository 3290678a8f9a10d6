"""The base of callbacks that act each time a training logs its values."""

import pytorch_lightning as pl


class IntervalCallback(pl.Callback):
    """Calls `at_interval` after every `log_every_n_steps` optimiser steps of a training."""

    _step = 0

    def at_interval(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do what the subclass does at the end of each interval of `log_every_n_steps` steps."""
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
        """Call `at_interval` if the batch ended a step and the step ended an interval."""
        if trainer.global_step == self._step:
            return  # The batch only added to the gradients; no step ended.

        self._step = trainer.global_step
        if self._step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.at_interval(trainer, pl_module)
