"""Refuses callbacks of Lightning that do not work with the trainings here."""

from collections.abc import Sequence

import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
)

from lit_knn.common.errors import InputError

# Advice for those who use one of these callbacks. A tuner trains for some steps, loads a checkpoint that it saved
# before them, and begins again. But here a run never goes on with another batch size, and counts all its steps. A
# schedule of the accumulation changes the batch size, too, so that no checkpoint could be resumed from.
ADVICE: dict[type[pl.Callback], str] = {
    LearningRateFinder: "compare short runs, such as --trainer.max_steps 200 --model.lr 1e-3",
    BatchSizeFinder: "give --data.batch_size; lit-knn plan says what fits",
    GradientAccumulationScheduler: "give one number, --trainer.accumulate_grad_batches",
}


def check_callbacks(callbacks: Sequence[pl.Callback]) -> None:
    """Raise InputError for callbacks that do not work. The class `Tuner` of Lightning makes two of them."""
    for callback in callbacks:
        for kind, advice in ADVICE.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise InputError(f"trainer.callbacks: {name} does not work here: {advice}")
