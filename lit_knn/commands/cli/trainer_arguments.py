"""Arguments of the trainer that follow from the command and its run, beside the options that were given."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.loggers import TensorBoardLogger

from lit_knn.callbacks import StepProgressBar
from lit_knn.commands.cli.trainer_options import validated_at_the_end
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.names import folder_of_name, job_folder


def arguments_of_every_run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that do not depend on the run's folder, by the trainer's options."""
    # Lightning's own logging of hyperparameters knows neither estimator nor net; `SaveConfig` logs all options.
    arguments: dict[str, Any] = {"enable_autolog_hparams": False}
    arguments["callbacks"] = _with_progress_bar(options)
    arguments |= validated_at_the_end(options)
    return arguments


def arguments_of_folder(options: Mapping[str, Any], run: RunFolder, version: str) -> dict[str, Any]:
    """Return the arguments that depend on the run's folder.

    Args:
        options: those of the trainer.
        run: the folder.
        version: its name in the folder of all runs of this name.
    """
    arguments: dict[str, Any] = {}
    # This is Lightning's default logger, in the run's folder.
    if options["logger"] in (None, True):
        named = folder_of_name(options)
        arguments["logger"] = TensorBoardLogger(named.parent, named.name, version)

    # In one folder, all runs would go on from each other's checkpoints.
    job = job_folder()
    if job:
        arguments["default_root_dir"] = str(run.path / job)
    return arguments


def arguments_of_other_gpu(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a plan for GPUs of another machine: this one may have none."""
    if options["accelerator"] in ("gpu", "cuda") and not torch.cuda.is_available():
        return {"accelerator": "cpu"}
    return {}


def _with_progress_bar(options: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks. They show progress over the whole run, unless options set another bar or no bar."""
    callbacks = options["callbacks"] or []
    if not isinstance(callbacks, list):
        callbacks = [callbacks]

    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if has_bar or options["enable_progress_bar"] is False:
        return callbacks
    return [*callbacks, StepProgressBar()]
