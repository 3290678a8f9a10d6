"""The option `--ckpt_path`: checks it before any long work, and finds the checkpoint that it stands for."""

import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl

from lit_knn.common.checkpoint_file import last_checkpoint
from lit_knn.common.errors import InputError, prefixed
from lit_knn.data import ReferenceDataModule
from lit_knn.runs.checkpoints import WholeCheckpointIO
from lit_knn.runs.names import job_folder
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


def find_start(
    path: str | None, command: str, options: Callable[[], dict[str, Any]]
) -> tuple[Path, dict[str, Any]] | None:
    """Find path and content of the checkpoint of a queued job, or of `last`; return None for another path.

    Args:
        path: as it was typed.
        command: name of the command.
        options: returns those that the run's config.yaml will have, which takes time.
    """
    start = None
    if resumes(command) and job_folder():
        start = checkpoint_of_job(options())
    if start is None and path == "last":
        start = newest_checkpoint(options(), resumes(command))
    return start


def file_of(path: str) -> str:
    """Return the checkpoint that a path names; of a folder, the last."""
    return str(last_checkpoint(path)) if Path(path).is_dir() else path


def refuse_when_loaded(datamodule: pl.LightningDataModule, error: InputError) -> None:
    """Let the data module raise an error.

    When they load data, the processes can tell each other of errors for the first time.
    """
    if not isinstance(datamodule, ReferenceDataModule):
        raise error
    datamodule.load = partial(_refuse, error)  # type: ignore[method-assign]


def hand_over(trainer: pl.Trainer, model: Any, path: str, checkpoint: dict[str, Any]) -> None:
    """Check that the weights of a checkpoint are for the model, and keep them for Lightning's loading."""
    if hasattr(model, "check_checkpoint"):
        with prefixed(f"--ckpt_path {path}"):
            model.check_checkpoint(checkpoint)

    io = trainer.strategy.checkpoint_io
    if isinstance(io, WholeCheckpointIO):
        io.keep(path, checkpoint)


def _refuse(error: InputError) -> NoReturn:
    raise error
