"""Checks the checkpoint that a training starts from, and what it would overwrite; repairs counts in a checkpoint."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.trainer.states import RunningStage

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, prefixed
from lit_knn.runs.names import is_of_job
from lit_knn.runs.same_run import check_same_run, describe_run


def check_fit(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    start: str | None,
    checkpoint: Content | None,
) -> None:
    """Raise InputError if a training cannot continue from its checkpoint, or would overwrite those of another run.

    Args:
        trainer: the trainer.
        model: the module that it trains.
        datamodule: the data.
        start: the path of the checkpoint that the training starts from, or None.
        checkpoint: the content of that checkpoint, or None.
    """
    step = 0
    if checkpoint is not None:
        step = checkpoint["global_step"]
        with prefixed(f"--ckpt_path {start}"):
            check_same_run(checkpoint, describe_run(trainer, model, datamodule))
        if 0 <= trainer.max_steps < step:
            problem = f"{start} has {step} steps already; give more"
            raise InputError(f"--trainer.max_steps {trainer.max_steps}: {problem}")
        check_time_left(trainer, start, checkpoint)

    # A job that SLURM has queued again may overwrite its own checkpoints: it only repeats its last steps.
    is_queued_again = start is not None and is_of_job(start)
    if is_queued_again or not trainer.is_global_zero:
        return
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "check_overwrites"):
            callback.check_overwrites(trainer, step, start)


def check_time_left(trainer: pl.Trainer, start: str | None, checkpoint: Content) -> None:
    """Raise InputError if the parts before a checkpoint have used all of a timer's time, such as `max_time`.

    A timer counts the time of all parts of a run, so the run would end before its first step, as if it had succeeded.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if not isinstance(callback, Timer):
            continue
        saved = checkpoint.get("callbacks", {}).get(callback.state_key, {})
        used = saved.get("time_elapsed", {}).get(RunningStage.TRAINING.value, 0.0)
        limit = callback.time_remaining()
        if limit is not None and 0 < limit <= used:
            problem = f"{start} has used {used:.0f} of {limit:.0f} s, which count from the run's first start"
            raise InputError(f"--trainer.max_time or Timer: {problem}; give more")


def repair_progress(checkpoint: Content) -> None:
    """Set Lightning's counts of batches in a checkpoint, in place, to the end of the last batch that was trained on.

    If an error cut a later batch short, Lightning's total counts would otherwise stay one ahead for good.
    A resumed run does no validation after this batch.
    """
    fit_loop = checkpoint["loops"]["fit_loop"]
    progress = fit_loop["epoch_loop.batch_progress"]

    # An error cut a batch short: it was counted as ready, but not as processed. Undo what else was counted for it.
    if progress["current"]["ready"] > progress["current"]["processed"]:
        progress["is_last_batch"] = False
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    # If one batch is processed but not completed, Lightning resumes at the end of this batch, and completes it.
    for counts in (progress["total"], progress["current"]):
        counts.update(
            ready=counts["processed"],
            started=counts["processed"],
            completed=counts["processed"] - 1,
        )
