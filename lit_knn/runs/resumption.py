"""Checks what a training starts from and would overwrite; repairs the counts of a checkpoint."""

import pytorch_lightning as pl

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, prefixed
from lit_knn.runs.identity import check_same_run, describe_run
from lit_knn.runs.names import is_of_job


def check_fit(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    start: str | None,
    checkpoint: Content | None,
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


def repair_progress(checkpoint: Content) -> None:
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
