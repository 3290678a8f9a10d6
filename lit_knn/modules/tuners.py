"""Refuses Lightning's tuners, which no training here can bear."""

from collections.abc import Sequence

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder

from lit_knn.common.errors import InputError

# What to do in place of Lightning's tuners. They train for some steps, load a checkpoint of their
# own, and begin again. But here a run never goes on with another batch size, and counts all its
# steps.
TUNERS = {
    LearningRateFinder: "compare short runs, such as --trainer.max_steps 200 --model.lr 1e-3",
    BatchSizeFinder: "give --data.batch_size; lit-knn plan says what fits",
}


def check_no_tuner(callbacks: Sequence[pl.Callback]) -> None:
    """Refuse Lightning's tuners. `Tuner` makes callbacks of these classes, too."""
    for callback in callbacks:
        for kind, advice in TUNERS.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise InputError(f"trainer.callbacks: {name} does not work here: {advice}")
