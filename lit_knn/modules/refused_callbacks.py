"""Refuses callbacks of Lightning that do not work with the trainings here."""

from collections.abc import Sequence

import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lit_knn.common.errors import InputError
from lit_knn.modules.averaging import Averaging

# Advice for those who use one of Lightning's tuners. A tuner trains for some steps, loads a checkpoint that it saved
# before them, and begins again. But here a run never goes on with another batch size, and counts all its steps.
TUNERS: dict[type[pl.Callback], str] = {
    LearningRateFinder: "compare short runs, such as --trainer.max_steps 200 --model.lr 1e-3",
    BatchSizeFinder: "give --data.batch_size; lit-knn plan says what fits",
}
AVERAGES = (
    "each training averages its weights already (--model.ema_decay or --model.ema_half_life_images); "
    "lit_knn.callbacks.PowerAverages keeps averages of other lengths"
)
# A schedule of the accumulation changes the batch size, too, so that no checkpoint could be resumed from. A second
# average would exchange the weights with the first, and write them under the same names in the checkpoint. Commands
# that do not train may have these callbacks in the settings of an older run.
OF_TRAININGS: dict[type[pl.Callback], str] = {
    GradientAccumulationScheduler: "give one number, --trainer.accumulate_grad_batches",
    StochasticWeightAveraging: AVERAGES,
    WeightAveraging: AVERAGES,
}


def check_callbacks(callbacks: Sequence[pl.Callback], trains: bool = False) -> None:
    """Raise InputError for callbacks that do not work, or not in a training. `Tuner` of Lightning makes tuners, too."""
    refused = TUNERS | OF_TRAININGS if trains else TUNERS
    for callback in callbacks:
        if type(callback) is Averaging:
            continue  # The training's own, of an earlier fit of the same trainer.
        for kind, advice in refused.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise InputError(f"trainer.callbacks: {name} does not work here: {advice}")
