"""Refuses Lightning's tuners, which do not work with the trainings here."""

from collections.abc import Sequence

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder

from lit_knn.common.errors import InputError

# Advice for those who use one of Lightning's tuners. A tuner trains for some steps, loads a checkpoint
# that it saved before them, and begins again. But here a run never goes on with another batch size,
# and counts all its steps.
TUNERS = {
    LearningRateFinder: "compare short runs, such as --trainer.max_steps 200 --model.lr 1e-3",
    BatchSizeFinder: "give --data.batch_size; lit-knn plan says what fits",
}


def check_no_tuner(callbacks: Sequence[pl.Callback]) -> None:
    """Raise InputError for Lightning's tuners. The class `Tuner` of Lightning makes these callbacks, too."""
    for callback in callbacks:
        for kind, advice in TUNERS.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise InputError(f"trainer.callbacks: {name} does not work here: {advice}")
