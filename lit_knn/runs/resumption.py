"""Checks what a training starts from and would overwrite; repairs the counts of a checkpoint."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from lit_knn.common.distributed import in_every_process
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.settings import flat_settings
from lit_knn.runs.names import is_of_job
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
    """Refuse a checkpoint that this fit cannot go on from, and a fit that overwrites a longer one.

    Args:
        trainer: the trainer of the fit.
        model: the module that it trains.
        datamodule: its data.
        start: the path of the checkpoint that it starts from, or None.
        checkpoint: the content of that checkpoint.
    """
    step = 0
    if checkpoint is not None:
        step = checkpoint["global_step"]
        with prefixed(f"--ckpt_path {start}"):
            check_same_run(checkpoint, describe_run(trainer, model, datamodule))
        if 0 <= trainer.max_steps < step:
            problem = f"{start} has {step} steps already; give more"
            raise InputError(f"--trainer.max_steps {trainer.max_steps}: {problem}")

    # A requeued run only repeats its own last steps.
    requeued = start is not None and is_of_job(start)
    if requeued or not trainer.is_global_zero:
        return
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "check_overwrites"):
            callback.check_overwrites(trainer, step, start)


def describe_run(
    trainer: pl.Trainer, pl_module: Any, datamodule: Any = None
) -> dict[str, int | str]:
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
        "seed": getattr(pl_module.hparams, "seed", None),
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

    description: dict[str, int | str] = {}
    for name, value in known.items():
        if value is not None:
            description[name] = value if isinstance(value, str) else int(value)
    return description


def check_same_run(checkpoint: dict[str, Any], now: dict[str, int | str]) -> None:
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


def optimisation(trainer: pl.Trainer) -> dict[str, str]:
    """Return the classes of optimiser and schedule, and the length of the schedule.

    A checkpoint holds their states.
    """
    schedules = []
    for config in trainer.lr_scheduler_configs:
        schedule = type(config.scheduler).__name__
        cosine_steps = getattr(config.scheduler, "T_max", None)
        steps = getattr(config.scheduler, "total_steps", cosine_steps)
        if steps is not None:
            schedule = f"{schedule} of {steps} steps"
        schedules.append(schedule)

    optimizers = [type(optimizer).__name__ for optimizer in trainer.optimizers]
    return {"optimizer": ", ".join(optimizers), "lr_scheduler": ", ".join(schedules) or "none"}


def check_optimisation(
    trainer: pl.Trainer, before: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Refuse other optimisers, schedules or rates than the checkpoint's, and a schedule too short.

    Args:
        trainer: the trainer of the run, with its optimisers.
        before: the `optimisation` of the run that wrote the checkpoint; empty for a new run.
        groups: the parameter groups of the checkpoint, with their rates.
    """
    advice = "give the same, or start a new run"
    for name, now in optimisation(trainer).items():
        if before.get(name, now) != now:
            problem = f"the checkpoint has the state of {name} {before[name]}, not of {now}"
            raise InputError(f"--ckpt_path: {problem}: {advice}")

    current_groups = []
    for optimizer in trainer.optimizers:
        current_groups.extend(optimizer.param_groups)
    for saved, group in zip(groups, current_groups, strict=False):  # A new run has no saved groups.
        for name in ("initial_lr", "max_lr"):
            if saved.get(name) != group.get(name):
                problem = f"its schedule has {name}={saved.get(name)}, not {group.get(name)}"
                raise InputError(f"--ckpt_path: {problem}: {advice}")

    for config in trainer.lr_scheduler_configs:
        steps = getattr(config.scheduler, "total_steps", None)
        if steps is None or config.interval != "step":
            continue
        if steps * config.frequency < trainer.max_steps:
            schedule = type(config.scheduler).__name__
            problem = f"{schedule} would end before the {trainer.max_steps} steps of the training"
            raise InputError(f"--lr_scheduler.total_steps {steps}: {problem}")


def check_ranks(description: dict[str, Any]) -> None:
    """Raise InputError if another rank describes its run in another way.

    Every rank must call it.
    """
    descriptions = in_every_process(lambda: description)
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        for name in first | other:
            if other.get(name) != first.get(name):
                problem = f"rank {rank} trains with {name} {other.get(name)}"
                problem += f", and rank 0 with {first.get(name)}"
                raise InputError(f"{problem}: give all processes the same options and data")


def repair_progress(checkpoint: dict[str, Any]) -> None:
    """Bring Lightning's counts in a checkpoint, in place, to the end of a batch.

    No validation follows this batch. After one that an error cut short, Lightning's total counts
    would stay one ahead for good.
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
