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
from lit_knn.runs.names import Options, job_folder
from lit_knn.runs.starting import checkpoint_of_job, newest_checkpoint


def check_path(path: str | None, command: str, model: str) -> None:
    """Refuse a path that a command cannot use, or needs and lacks.

    Args:
        path: as it was typed.
        command: name of the command.
        model: class path of the model, which may have nothing to train.
    """
    trained = getattr(pkgutil.resolve_name(model), "needs_checkpoint", True)
    if not trained and (command == "fit" or path is not None):
        raise InputError(f"{model} has nothing to train: validate it without --ckpt_path")
    if path == "":  # It would be the current folder. A variable of the shell may be unset.
        raise InputError("--ckpt_path is empty")
    if path is None and trained and not resumes(command):
        raise InputError(f"--ckpt_path is missing: {command} needs a trained model")


def resumes(command: str) -> bool:
    """Return whether a command goes on from its checkpoint, in place of measuring it."""
    return command in ("fit", "plan")


def read(
    path: str | None, command: str, options: Callable[[], Options]
) -> tuple[str | None, Content | None]:
    """Return path and content of the checkpoint from which a command starts, or None twice.

    Args:
        path: as it was typed: a file, the folder of a run, or `last`. A job that is queued again may have a
            newer one.
        command: name of the command.
        options: returns those that the run's config.yaml will have, which takes time.
    """
    start = None
    if resumes(command) and job_folder():
        start = checkpoint_of_job(options())
    if start is None and path == "last":
        start = newest_checkpoint(options(), resumes(command))
    if start is not None:
        return str(start[0]), start[1]
    if path is None:
        return None, None

    with prefixed("--ckpt_path"):
        file = str(last_checkpoint(path)) if Path(path).is_dir() else path
        return file, read_training(file, to_resume=resumes(command))


def refuse_when_loaded(datamodule: pl.LightningDataModule, error: InputError) -> None:
    """Let the data module raise an error.

    When they load data, the processes can tell each other of errors for the first time.
    """
    if not isinstance(datamodule, ReferenceDataModule):
        raise error
    datamodule.load = partial(_refuse, error)  # type: ignore[method-assign]


def hand_over(
    trainer: pl.Trainer, model: pl.LightningModule, path: str, checkpoint: Content
) -> None:
    """Check that the weights of a checkpoint are for the model, and keep them for Lightning's loading.

    Args:
        trainer: loads the checkpoint later.
        model: gets the weights.
        path: names the checkpoint in errors.
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
