"""Callbacks that measure training steps: their speed, and how often they make the host wait for the GPU."""

import warnings
from typing import Any

import pytorch_lightning as pl
import torch

WORDS = "synchronizing CUDA operation"


class StepClock(pl.Callback):
    """Reads the module's own monitor over the optimiser steps after a warm-up, in which the first steps take memory.

    Args:
        warm_up: steps before the clock starts.
    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.started = False
        self.values: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Start after the warm-up, and stop after the last step."""
        start, stop = trainer.global_step >= self.warm_up and not self.started, trainer.global_step >= trainer.max_steps
        if not (start or stop):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        if start:
            self.started = True
            pl_module.monitor.restart()
        else:
            self.values = pl_module.monitor.read()


class SyncCounter(pl.Callback):
    """Counts the synchronisations of the step after `warm_up` steps, by PyTorch's own debug mode.

    PyTorch notices most of them, but not those of other libraries.

    Attributes:
        count: number of synchronisations; None if no step was counted, for instance on a CPU.
    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.count: int | None = None
        self._recorder: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Begin to count."""
        if trainer.global_step == self.warm_up and pl_module.device.type == "cuda":
            self._recorder = warnings.catch_warnings(record=True)
            self._found = self._recorder.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        """Store the count."""
        if self._recorder is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._recorder.__exit__(None, None, None)
            self._recorder = None
            self.count = sum(WORDS in str(warning.message) for warning in self._found)
