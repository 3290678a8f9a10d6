"""Checks that all ranks of a run have the same options and data, and that a resumed run continues the same run."""

import hashlib
import json
from collections.abc import Mapping

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import TrainerFn

from lit_knn.common.checkpoint_file import RUN_KEY, Content
from lit_knn.common.distributed import in_every_process
from lit_knn.common.errors import InputError
from lit_knn.common.settings import flat_settings
from lit_knn.estimators import ByClass, Estimator
from lit_knn.runs.optimiser import optimisation
from lit_knn.runs.run import data_autoencoder, find_reference

Identity = dict[str, int | str]
"""What must stay the same when a run is resumed, by name, such as the seed, the batch size and a hash of the data."""
# Each batch would get other images or other noise if one of these changed. The values are their names in messages.
MUST_AGREE = {
    "ranks": "ranks (trainer.devices times trainer.num_nodes)",
    "seed": "--seed_everything",
    "batch_size": "--data.batch_size",
    "accumulate_grad_batches": "--trainer.accumulate_grad_batches",
    "images": "number of images of the data",
    "data": "images with the hash",
    "shards": "images with the hash",
    "labels": "class labels with the hash",
    "autoencoder": "--data.autoencoder",
}
# This many digits of a hash are enough to distinguish data sets.
HASH_DIGITS = 16
# If ranks had different values of these options of the trainer, they would wait for each other forever, or train
# different weights.
SAME_ON_RANKS = (
    "max_steps",
    "max_epochs",
    "precision",
    "gradient_clip_val",
    "val_check_interval",
    "limit_val_batches",
)


class SameRun(pl.Callback):
    """Refuses a run whose ranks have different options or data, and a checkpoint of another run.

    For this, it writes the identity of the run into each checkpoint.

    Args:
        estimators: the estimators of the training, by the names of their options.
    """

    def __init__(self, estimators: Mapping[str, Estimator]) -> None:
        self._estimators = estimators
        self._loaded_step = 0

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Raise InputError if a training is resumed from a checkpoint of another run."""
        if trainer.state.fn == TrainerFn.FITTING:
            check_same_run(checkpoint, describe_run(trainer, pl_module))
            self._loaded_step = checkpoint["global_step"]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise InputError if ranks differ in data, optimiser, or the options of model and trainer."""
        description: dict[str, object] = {
            **describe_run(trainer, pl_module),
            **optimisation(trainer),
        }
        description["step"] = self._loaded_step

        options = dict(pl_module.hparams)
        for option, estimator in self._estimators.items():
            # A class-conditional module wraps its estimators. The options are those of the estimator inside.
            named = estimator.estimator if isinstance(estimator, ByClass) else estimator
            options |= flat_settings(option, named)
        for name, value in options.items():
            if isinstance(value, (bool, int, float, str)):
                description[name] = value

        for name in SAME_ON_RANKS:
            # A trainer whose validations come by the clock has no `val_check_interval`.
            description[name] = getattr(trainer, name, None)
        check_ranks(description)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Write the identity of the run into the checkpoint. Every rank must call it, see `describe_run`."""
        checkpoint[RUN_KEY] = describe_run(trainer, pl_module) | optimisation(trainer)


def describe_run(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None = None,
) -> Identity:
    """Return what must stay the same when the run is resumed, without what is not known of it.

    All ranks get the same result. Every rank must call it, because the hash of a sharded set is made
    from the hashes of all ranks.

    Args:
        trainer: the trainer of the run.
        pl_module: the module that it trains.
        datamodule: its data; by default those of the trainer.
    """
    if datamodule is None:
        datamodule = getattr(trainer, "datamodule", None)

    known: dict[str, int | str | None] = {
        "ranks": trainer.world_size,
        "seed": getattr(pl_module, "seed", None),
        "batch_size": getattr(datamodule, "batch_size", None),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }
    reference = find_reference(trainer)
    if reference is not None:
        # Of latents, the images are hashed: the last bits of latents depend on the device and the number of threads.
        hashed_set = getattr(datamodule, "image_reference", None) or reference
        # The same images have another hash in shards. It has a name of its own, so a run may go on with or without
        # shards: only values of the same name are compared.
        name_of_hash = "shards" if reference.sharded else "data"
        known["images"] = reference.N
        known[name_of_hash] = hashed_set.fingerprint()[:HASH_DIGITS]

        autoencoder = data_autoencoder(trainer)
        if autoencoder is not None:
            settings = flat_settings("autoencoder", autoencoder)
            known["autoencoder"] = json.dumps(settings, default=lambda part: type(part).__name__)

        if getattr(pl_module, "conditioning", None) and reference.labels is not None:
            labels = reference.labels.cpu().numpy().tobytes()
            known["labels"] = hashlib.sha256(labels).hexdigest()[:HASH_DIGITS]

    description: Identity = {}
    for name, value in known.items():
        if value is not None:
            description[name] = value if isinstance(value, str) else int(value)
    return description


def check_same_run(checkpoint: Content, now: Identity) -> None:
    """Raise InputError if this run would give other images or noise to the batches after the checkpoint.

    The noise depends on the rank, and the order of the images on the number of images in a batch of all
    ranks. So a run on another number of ranks cannot continue the run of the checkpoint.

    Args:
        checkpoint: the content of the checkpoint.
        now: the identity of this run.
    """
    before = checkpoint.get(RUN_KEY, {})
    for name, what in MUST_AGREE.items():  # A name is missing if its value was not known.
        if name in before and name in now and before[name] != now[name]:
            problem = f"the checkpoint is of a run with {what} {before[name]}, not {now[name]}"
            reason = "with another value its batches and noise would not continue"
            raise InputError(f"{problem}; {reason}: give the same, or start a new run")


def check_ranks(description: Mapping[str, object]) -> None:
    """Raise InputError if the ranks describe their run differently. Every rank must call it.

    Args:
        description: names and values that must be the same on all ranks.
    """
    descriptions = in_every_process(lambda: description)
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                problem = f"rank {rank} trains with {name} {other.get(name)}"
                problem += f", and rank 0 with {first.get(name)}"
                raise InputError(f"{problem}: give all processes the same options and data")
