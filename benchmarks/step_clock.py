"""A callback that measures the speed of a few training steps."""

from typing import Any

import pytorch_lightning as pl
import torch


class StepClock(pl.Callback):
    """Reads the module's own monitor over the optimiser steps after a warm-up.

    Args:
        warmup: steps before the clock starts, because the first steps allocate memory.
        steps: number of measured steps.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup = warmup
        self.steps = steps
        self.started = False
        self.values: dict[str, float] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start after the warm-up, and stop after the last step."""
        start, stop = trainer.global_step >= self.warmup and not self.started, trainer.global_step >= trainer.max_steps
        if not (start or stop):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        if start:
            self.started = True
            pl_module.monitor.restart()  # type: ignore[operator, union-attr]
        else:
            self.values = pl_module.monitor.read()  # type: ignore[operator, union-attr]
