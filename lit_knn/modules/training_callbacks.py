"""The callbacks that every training has, in the order in which they run."""

from typing import TYPE_CHECKING

import pytorch_lightning as pl

from lit_knn.modules.averaging import Averaging
from lit_knn.modules.counts import TrainingCounts
from lit_knn.modules.finite_loss import FiniteLoss
from lit_knn.modules.training_log import TrainingLog
from lit_knn.runs.clock import TrainingClock
from lit_knn.runs.interruption import Interruption
from lit_knn.runs.optimiser import ResumedOptimiser
from lit_knn.runs.same_run import SameRun

if TYPE_CHECKING:
    from lit_knn.modules.base import EstimatorTraining


def training_callbacks(module: "EstimatorTraining", trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks that every training has.

    They run after the callbacks of the trainer, and before those that save checkpoints.
    """
    device = trainer.strategy.root_device
    return [
        # Refuse to resume a run with options that would make it another training.
        SameRun(module.estimators),
        ResumedOptimiser(),
        FiniteLoss(module.checks),
        # Log.
        TrainingClock(module.estimator_watch, lambda: module.images_seen),
        TrainingLog(module.level_range, device, module.interval_metrics),
        # Average the weights; validation and checkpoints use the average.
        Averaging(device, module.average_decay),
        # Count the batch when all other callbacks have seen it. Only then may an interruption end the training.
        TrainingCounts(module),
        Interruption(),
    ]
