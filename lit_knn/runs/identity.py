"""What must be the same on all ranks of a run, and in a run that is resumed."""

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
"""Numbers and names of the data, the ranks and the optimiser of a run."""
# The count of batches means other images and other noise if one of these changes.
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
# So many digits tell data sets apart.
HASH_DIGITS = 16
# With other values of these options of the trainer, ranks would wait for each other, or train
# other weights.
SAME_ON_RANKS = (
    "max_steps",
    "max_epochs",
    "precision",
    "gradient_clip_val",
    "val_check_interval",
    "limit_val_batches",
)


class SameRun(pl.Callback):
    """Refuses ranks with other options or data, and a checkpoint of another run.

    Checkpoints hold the identity of their run.

    Args:
        estimators: those of the training, by the names of their options.
    """

    def __init__(self, estimators: Mapping[str, Estimator]) -> None:
        self._estimators = estimators
        self._loaded_step = 0

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Refuse a checkpoint of another run."""
        if trainer.state.fn == TrainerFn.FITTING:
            check_same_run(checkpoint, describe_run(trainer, pl_module))
            self._loaded_step = checkpoint["global_step"]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse ranks that differ in data, optimiser, or the options of model and trainer."""
        same: dict[str, object] = {**describe_run(trainer, pl_module), **optimisation(trainer)}
        same["step"] = self._loaded_step

        options = dict(pl_module.hparams)
        for option, estimator in self._estimators.items():
            part = estimator.estimator if isinstance(estimator, ByClass) else estimator
            options |= flat_settings(option, part)
        for name, value in options.items():
            if isinstance(value, (bool, int, float, str)):
                same[name] = value

        for name in SAME_ON_RANKS:
            same[name] = getattr(trainer, name)
        check_ranks(same)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Content
    ) -> None:
        """Save the identity of the run. Every rank must call it, see `describe_run`."""
        checkpoint[RUN_KEY] = describe_run(trainer, pl_module) | optimisation(trainer)


def describe_run(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None = None,
) -> Identity:
    """Return what must stay the same when the run is resumed, as far as it is known.

    All ranks get the same. Every rank must call it, because the hash of a sharded set is made of
    the hashes of all ranks.

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
        # The last bits of latents depend on the device and the number of threads.
        images = getattr(datamodule, "image_reference", None) or reference
        # A set in shards has another hash, and a run may go on with it.
        hashed = "shards" if reference.sharded else "data"
        known["images"] = reference.N
        known[hashed] = images.fingerprint()[:HASH_DIGITS]

        coder = data_autoencoder(trainer)
        if coder is not None:
            settings = flat_settings("autoencoder", coder)
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
    """Refuse the first option that changes the meaning of the checkpoint's counts.

    Noise is keyed by rank, and the order of the images by the size of all ranks' batches. So a run
    on another number of ranks cannot repeat the uninterrupted one.
    """
    before = checkpoint.get(RUN_KEY, {})
    for name, what in MUST_AGREE.items():
        if name in before and name in now and before[name] != now[name]:
            problem = f"the checkpoint is of a run with {what} {before[name]}, not {now[name]}"
            reason = "with another value its batches and noise would not continue"
            raise InputError(f"{problem}; {reason}: give the same, or start a new run")


def check_ranks(description: Mapping[str, object]) -> None:
    """Raise InputError if another rank describes its run in another way.

    Every rank must call it.
    """
    descriptions = in_every_process(lambda: description)
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                problem = f"rank {rank} trains with {name} {other.get(name)}"
                problem += f", and rank 0 with {first.get(name)}"
                raise InputError(f"{problem}: give all processes the same options and data")
