"""The option `--ckpt_path`: checks it before any long work, and finds the checkpoint that it stands for."""

import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytorch_lightning as pl

from lit_knn.common.checkpoint_file import Content, last_checkpoint
from lit_knn.common.errors import InputError, prefixed
from lit_knn.data import ReferenceDataModule
from lit_knn.runs.checkpoints import WholeCheckpointIO, read_training
from lit_knn.runs.folder_choice import TRAININGS
from lit_knn.runs.names import Options, job_folder
from lit_knn.runs.starting import checkpoint_of_job, newest_checkpoint, warn_of_changes


def check_path(path: str | None, command: str, model: str) -> None:
    """Raise InputError if the command cannot use the given path, or needs one and got none.

    Args:
        path: the value of --ckpt_path as it was typed, or None.
        command: name of the command.
        model: class path of the model, which may have nothing to train.
    """
    is_trainable = getattr(pkgutil.resolve_name(model), "needs_checkpoint", True)
    if not is_trainable and (command == "fit" or path is not None):
        raise InputError(f"{model} has nothing to train: validate it without --ckpt_path")
    # An unset variable of the shell makes an empty path, which would mean the current folder.
    if path == "":
        raise InputError("--ckpt_path is empty")
    if path is None and is_trainable and command not in TRAININGS:
        raise InputError(f"--ckpt_path is missing: {command} needs a trained model")


def read(
    path: str | None, command: str, options: Callable[[], Options]
) -> tuple[str | None, Content | None]:
    """Return the path and the content of the checkpoint from which a command starts, or None and None.

    Args:
        path: the value of --ckpt_path as it was typed: a file, the folder of a run, or `last`. If SLURM has queued
            the job of a training again, a checkpoint of that job replaces it.
        command: name of the command.
        options: a function that returns the options as the run's config.yaml will have them; making them takes time.
    """
    # Other commands do not continue the training of the checkpoint, but only measure it.
    to_resume = command in TRAININGS
    if to_resume and job_folder():
        start = checkpoint_of_job(options())
        if start is not None:
            # A warning has named the options that changed.
            return str(start.path), start.content
    if path is None:
        return None, None

    now = options() if to_resume or path == "last" else {}
    if path == "last":
        newest, content = newest_checkpoint(now, to_resume)
        file = str(newest)
    else:
        with prefixed("--ckpt_path"):
            file = str(last_checkpoint(path)) if Path(path).is_dir() else path
            content = read_training(file, to_resume)
    if to_resume:
        warn_of_changes(file, now)
    return file, content


def refuse_when_loaded(datamodule: pl.LightningDataModule, error: InputError) -> None:
    """Replace the data module's `load` by a function that raises an error.

    `load` is the first place where the processes can tell each other of errors, so all of them end.
    """
    if not isinstance(datamodule, ReferenceDataModule):
        raise error
    datamodule.load = partial(_refuse, error)  # type: ignore[method-assign]


def hand_over(
    trainer: pl.Trainer, model: pl.LightningModule, path: str, checkpoint: Content
) -> None:
    """Check that a checkpoint fits the model, and give its content to the trainer, which then reads no file.

    Args:
        trainer: loads the checkpoint later.
        model: gets the weights.
        path: path of the checkpoint.
        checkpoint: its content.
    """
    check = getattr(model, "check_checkpoint", None)
    if check is not None:
        with prefixed(f"--ckpt_path {path}"):
            check(checkpoint)

    io = trainer.strategy.checkpoint_io
    if isinstance(io, WholeCheckpointIO):
        io.keep(path, checkpoint)


def _refuse(error: InputError) -> NoReturn:
    raise error
