"""Refuses callbacks of Lightning that do not work with the trainings here."""

from collections.abc import Sequence

import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
)

from lit_knn.common.errors import InputError

# Advice for those who use one of Lightning's tuners. A tuner trains for some steps, loads a checkpoint that it saved
# before them, and begins again. But here a run never goes on with another batch size, and counts all its steps.
TUNERS: dict[type[pl.Callback], str] = {
    LearningRateFinder: "compare short runs, such as --trainer.max_steps 200 --model.lr 1e-3",
    BatchSizeFinder: "give --data.batch_size; lit-knn plan says what fits",
}
# A schedule of the accumulation changes the batch size, too, so that no checkpoint could be resumed from. Commands that
# do not train may have it in the settings of an older run.
OF_TRAININGS: dict[type[pl.Callback], str] = {
    GradientAccumulationScheduler: "give one number, --trainer.accumulate_grad_batches",
}


def check_callbacks(callbacks: Sequence[pl.Callback], trains: bool = False) -> None:
    """Raise InputError for callbacks that do not work, or not in a training. `Tuner` of Lightning makes tuners, too."""
    refused = TUNERS | OF_TRAININGS if trains else TUNERS
    for callback in callbacks:
        for kind, advice in refused.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise InputError(f"trainer.callbacks: {name} does not work here: {advice}")
