"""Arguments of the trainer and its loggers that are not options, but follow from the command and its run."""

from collections.abc import Mapping

import pytorch_lightning as pl
import torch
from jsonargparse import Namespace
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.loggers import TensorBoardLogger

from lit_knn.callbacks import StepProgressBar
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.names import expanded, folder_of_name, job_folder


def of_every_run(options: Namespace) -> dict[str, object]:
    """Return the arguments that do not depend on the run's folder; `options` are those of the trainer."""
    # Lightning would log hyperparameters without estimator and net. `SaveConfig` logs all options in its place.
    arguments: dict[str, object] = {"enable_autolog_hparams": False}
    arguments["callbacks"] = _with_progress_bar(options)

    # A run that would end before its first validation is validated at its end.
    every = options.val_check_interval
    batches = options.max_steps * (options.accumulate_grad_batches or 1)
    counts_batches = type(every) is int and options.check_val_every_n_epoch is None
    if counts_batches and 0 < batches < every:
        arguments["val_check_interval"] = batches
    return arguments


def of_folder(options: Namespace, run: RunFolder, version: str) -> dict[str, object]:
    """Return the arguments that depend on the run's folder.

    Args:
        options: the options of the trainer.
        run: the run's folder.
        version: its path from the folder of all runs of this name.
    """
    arguments: dict[str, object] = {}
    # This is Lightning's default logger, in the run's folder.
    if options.logger in (None, True):
        folder = folder_of_name(vars(options))
        arguments["logger"] = TensorBoardLogger(folder.parent, folder.name, version)

    # Lightning saves a checkpoint here at SLURM's signal. In a folder that runs share, each would resume from those of
    # the others.
    job = job_folder()
    if job:
        arguments["default_root_dir"] = str(run.path / job)
    return arguments


def of_other_gpu(options: Namespace) -> dict[str, object]:
    """Return the arguments of a plan for GPUs of another machine, which takes the CPU if this machine has no GPU."""
    if options.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        return {"accelerator": "cpu"}
    return {}


def of_logger(options: Mapping[str, object], version: str, trains: bool) -> dict[str, object]:
    """Return the options of a TensorBoard or CSV logger, with an expanded path and a version.

    Args:
        options: the options.
        version: the version of the run's folder. In a training a logger may have another one. Other commands may have
            the options of a training, into whose folder they must not write.
        trains: whether the command trains.
    """
    completed = dict(options)
    if completed.get("save_dir"):
        completed["save_dir"] = str(expanded(str(completed["save_dir"])))
    if completed.get("version") is None or not trains:
        completed["version"] = version
    return completed


def _with_progress_bar(options: Namespace) -> list[pl.Callback]:
    """Return the callbacks of the trainer, with `StepProgressBar` unless the options set another bar or none."""
    callbacks = options.callbacks or []
    if not isinstance(callbacks, list):
        callbacks = [callbacks]

    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if has_bar or options.enable_progress_bar is False:
        return callbacks
    return [*callbacks, StepProgressBar()]
