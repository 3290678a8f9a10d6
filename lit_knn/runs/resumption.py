"""Checks what a training starts from and would overwrite, and repairs the counts of a checkpoint."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from lit_knn.common.distributed import in_every_process
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.settings import flat_settings
from lit_knn.runs.job import is_of_job
from lit_knn.runs.run import data_autoencoder, find_reference

RUN_KEY = "run"
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


def check_fit(
    trainer: Any,
    model: pl.LightningModule,
    datamodule: Any,
    start: str | None,
    checkpoint: dict[str, Any] | None,
) -> None:
    """Refuse a checkpoint of other options or with too many steps, and a fit that would overwrite a longer one."""
    step = 0 if checkpoint is None else checkpoint["global_step"]
    if checkpoint is not None:
        with prefixed(f"--ckpt_path {start}"):
            check_same_run(checkpoint, describe_run(trainer, model, datamodule))
        if 0 <= trainer.max_steps < step:
            raise InputError(
                f"--trainer.max_steps {trainer.max_steps}: {start} has {step} steps already; give more"
            )
    requeued = start is not None and is_of_job(start)
    if trainer.is_global_zero and not requeued:  # A requeued run only repeats its own last steps.
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "check_overwrites"):
                callback.check_overwrites(trainer, step, start)


def describe_run(
    trainer: pl.Trainer, pl_module: Any, datamodule: Any = None
) -> dict[str, int | str]:
    """Return what must stay the same when the run is resumed, as far as it is known; all ranks get the same.

    Every rank must call it, because the hash of a sharded set is made of the hashes of all ranks.
    """
    datamodule = getattr(trainer, "datamodule", None) if datamodule is None else datamodule
    reference = find_reference(trainer)
    known: dict[str, int | str | None] = {
        "ranks": trainer.world_size,
        "seed": getattr(pl_module.hparams, "seed", None),
        "batch_size": getattr(datamodule, "batch_size", None),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }
    if reference is not None:
        # A set in shards has another hash, and a run may go on with it.
        hashed = "shards" if reference.sharded else "data"
        # The last bits of latents depend on the device and the number of threads.
        images = getattr(datamodule, "image_reference", None) or reference
        known |= {"images": reference.N, hashed: images.fingerprint()[:HASH_DIGITS]}
        if (coder := data_autoencoder(trainer)) is not None:
            settings = flat_settings("autoencoder", coder)
            known["autoencoder"] = json.dumps(settings, default=lambda part: type(part).__name__)
        if getattr(pl_module, "conditioning", None) and reference.labels is not None:
            known["labels"] = hashlib.sha256(reference.labels.cpu().numpy().tobytes()).hexdigest()[
                :HASH_DIGITS
            ]
    return {name: v if isinstance(v, str) else int(v) for name, v in known.items() if v is not None}


def check_same_run(checkpoint: dict[str, Any], now: dict[str, int | str]) -> None:
    """Refuse the first option that changes the meaning of the checkpoint's counts.

    Noise is keyed by rank, and the order of the images by the size of all ranks' batches. So a run on another number
    of ranks cannot repeat the uninterrupted one.
    """
    before = checkpoint.get(RUN_KEY, {})
    for name, what in MUST_AGREE.items():
        if name in before and name in now and before[name] != now[name]:
            told = f"the checkpoint is of a run with {what} {before[name]}, not {now[name]}"
            advice = "give the same, or start a new run"
            raise InputError(
                f"{told}; with another value its batches and noise would not continue: {advice}"
            )


def optimisation(trainer: pl.Trainer) -> dict[str, str]:
    """Return the classes of optimiser and schedule, whose state a checkpoint holds, and the length of the schedule."""
    found = (config.scheduler for config in trainer.lr_scheduler_configs)
    lengths = (
        (type(s).__name__, getattr(s, "total_steps", getattr(s, "T_max", None))) for s in found
    )
    schedules = [name if steps is None else f"{name} of {steps} steps" for name, steps in lengths]
    optimizers = [type(optimizer).__name__ for optimizer in trainer.optimizers]
    return {"optimizer": ", ".join(optimizers), "lr_scheduler": ", ".join(schedules) or "none"}


def check_optimisation(
    trainer: pl.Trainer, before: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Refuse other classes than `before`, rates other than those of the saved `groups`, and a schedule too short."""
    for name, now in optimisation(trainer).items():
        if before.get(name, now) != now:
            told = f"the checkpoint has the state of {name} {before[name]}, not of {now}"
            raise InputError(f"--ckpt_path: {told}: give the same, or start a new run")
    now_groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    for saved, group in zip(groups, now_groups, strict=False):  # A new run has no saved groups.
        for name in ("initial_lr", "max_lr"):
            if saved.get(name) != group.get(name):
                told = f"its schedule has {name}={saved.get(name)}, not {group.get(name)}"
                raise InputError(f"--ckpt_path: {told}: give the same, or start a new run")
    for config in trainer.lr_scheduler_configs:
        steps = getattr(config.scheduler, "total_steps", None)
        if (
            steps is not None
            and config.interval == "step"
            and steps * config.frequency < trainer.max_steps
        ):
            told = (
                f"{type(config.scheduler).__name__} would end before the {trainer.max_steps} steps"
            )
            raise InputError(f"--lr_scheduler.total_steps {steps}: {told} of the training")


def check_ranks(own: dict[str, Any]) -> None:
    """Raise InputError if another rank describes its run in another way. Every rank must call it."""
    first, *others = in_every_process(lambda: own)
    for rank, other in enumerate(others, 1):
        for name in (name for name in {**first, **other} if first.get(name) != other.get(name)):
            told = f"rank {rank} trains with {name} {other.get(name)}, and rank 0 with {first.get(name)}"
            raise InputError(f"{told}: give all processes the same options and data")


def repair_progress(checkpoint: dict[str, Any]) -> None:
    """Bring Lightning's counts in a checkpoint, in place, to the end of a batch, after which no validation follows.

    After a batch that an error cut short, Lightning's total counts would stay one ahead for good.
    """
    fit_loop = checkpoint["loops"]["fit_loop"]
    progress = fit_loop["epoch_loop.batch_progress"]
    # The error's batch was counted already.
    if progress["current"]["ready"] > progress["current"]["processed"]:
        progress["is_last_batch"] = False
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    for counts in (progress["total"], progress["current"]):
        counts.update(
            ready=counts["processed"],
            started=counts["processed"],
            completed=counts["processed"] - 1,
        )
