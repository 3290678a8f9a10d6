"""Say what a step and the whole run will cost, before training starts."""

import math
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from lit_knn.common.distributed import broadcast
from lit_knn.modules.base import EstimatorTraining
from lit_knn.modules.first_try import is_compiled, try_step
from lit_knn.runs.times import duration

# A first try that takes longer than this is not repeated, although it includes what PyTorch does only once.
LONGEST_TRY_S = 30.0
# The tries would take a large part of a run with fewer steps.
FEWEST_STEPS = 20


class StepCost(pl.Callback):
    """Before the first step of `fit`, print the time of a step and of all steps, from two tries of its batch.

    The second try counts. A try computes loss and gradients and drops them: the run is the same, bit for bit, as
    without it. Not counted are optimiser, validations, checkpoints, and the exchange of gradients between ranks.

    Nothing is tried with a compiled network, whose first call takes minutes, and in a run of fewer than 20 steps.
    `lit-knn fit` always adds this callback.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare for the first batch."""
        self._told = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Try the first batch and print its time."""
        if self._told:
            return
        self._told = True
        plain = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
        steps = trainer.estimated_stepping_batches - trainer.global_step
        if not plain or not isinstance(pl_module, EstimatorTraining) or 0 < steps < FEWEST_STEPS:
            return
        if is_compiled(pl_module):
            pl_module.print("The network is compiled at its first step, so the time of a step is not known before.")
            return
        pl_module.monitor.pause()
        told = try_step(pl_module, trainer, batch)
        # With a sharded reference set, a try needs all ranks, so the first one decides for all.
        twice = broadcast(told.seconds <= LONGEST_TRY_S)
        if twice:
            told = try_step(pl_module, trainer, batch)
        pl_module.monitor.restart()
        batches = trainer.accumulate_grad_batches
        images = len(pl_module._unpack(batch)[0]) * trainer.world_size * batches
        seconds, estimator = batches * told.seconds, batches * told.estimator_seconds
        line = f"A step of {images:,} images takes about {duration(seconds)} (estimator {duration(estimator)})"
        if 0 < steps < math.inf:
            line += f": {steps:,} steps about {duration(steps * seconds)}"
        pl_module.print(line if twice else f"{line}, by a single try")
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        samples = sum(callback.num_samples for callback in callbacks if hasattr(callback, "measure"))
        if samples > 0 and trainer.enable_validation:
            pl_module.print(f"Each validation draws {samples:,} samples more, whose time is not counted")
