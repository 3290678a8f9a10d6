"""Names of the folders of a run, `runs/NAME/VERSION/slurm_JOB`, from its options and its environment."""

import os
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.environments import SLURMEnvironment

from lit_knn.common.errors import InputError
from lit_knn.common.files import at_home

# These loggers write into folders NAME/VERSION. Other loggers write elsewhere.
FILE_LOGGERS = (TensorBoardLogger, CSVLogger)
DEFAULT_NAME = "lightning_logs"
# Loggers have one of these options for the name under which they group runs.
OPTIONS_FOR_NAMES = ("project", "experiment_name", "name")
# `best` and the settings of an export use these parts of a run's configuration. The other parts set how its training
# started and what it saved.
PARTS_OF_A_RUN = ("seed_everything", "model", "data", "trainer")

Options = Mapping[str, Any]
"""Options by name, nested as in config.yaml: those of a whole run, or of one part such as the trainer."""


def folder_of_name(trainer: Options) -> Path:
    """Return the folder of all runs that have the name of this one.

    It is `SAVE_DIR/NAME` of the first TensorBoard or CSV logger. If there is none, it is `runs/NAME`, where NAME is
    the name or project of another logger.

    Args:
        trainer: the options of the trainer.
    """
    root = trainer["default_root_dir"] or "."
    file_loggers = _logger_options(trainer, FILE_LOGGERS)
    if file_loggers:
        options = file_loggers[0]
        name = options.get("name", DEFAULT_NAME)
        return expanded(options.get("save_dir", root)) / (name or "")

    loggers = _logger_options(trainer)
    if loggers:
        for option in OPTIONS_FOR_NAMES:
            name = loggers[0].get(option)
            if name:
                return expanded(root) / str(name)
    return expanded(root) / DEFAULT_NAME


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` and `$NAME` replaced, as TensorBoard's logger does and the CSV logger does not."""
    return Path(at_home(os.path.expandvars(path)))


def given_version(trainer: Options) -> str | None:
    """Return the name of the folder that a TensorBoard or CSV logger gives to the run, or None."""
    for options in _logger_options(trainer, FILE_LOGGERS):
        version = options.get("version")
        if version is None:
            continue

        name = version if isinstance(version, str) else f"version_{version}"
        if name in ("", "..") or Path(name).name != name:
            problem = f"must be the name of a folder, got {name!r:.80}"
            raise InputError(f"trainer.logger.version {problem}")
        return name
    return None


def _logger_options(trainer: Options, kinds: tuple[type, ...] = (object,)) -> list[Options]:
    """Return the arguments of the loggers whose classes are among `kinds`; by default of all loggers."""
    loggers = trainer["logger"]
    if not isinstance(loggers, list):
        loggers = [loggers]

    arguments = []
    for logger in loggers:
        # `true` or `false` in place of a logger has no arguments.
        if not hasattr(logger, "get"):
            continue
        if issubclass(pkgutil.resolve_name(logger["class_path"]), kinds):
            arguments.append(options_in(logger))
    return arguments


def options_in(part: Options | None) -> Options:
    """Return the options of the class that a part of a configuration names, such as `model`; none without a class."""
    options: Options = (part or {}).get("init_args") or {}
    return options


def option_of(part: Options | None, name: str) -> Any:
    """Return an option of the class that a part names, or None if it has no such option."""
    return options_in(part).get(name)


def flattened(options: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield name and value of each option in a nested configuration, as on the command line.

    For example, `model.net` is the class of the net, and `model.net.channels` is one of its options.

    Args:
        options: the configuration, or one value in it.
        name: the name of this value; empty for the whole configuration.
    """
    if isinstance(options, list) and any(isinstance(part, Mapping) for part in options):
        options = dict(enumerate(options))
    if not isinstance(options, Mapping):
        yield name, options
        return

    if "class_path" in options:
        yield name, options["class_path"]
        options = options_in(options)

    for part, value in options.items():
        full_name = f"{name}.{part}" if name else str(part)
        yield from flattened(value, full_name)


def job_folder() -> str | None:
    """Return the name of the subfolder of a run that belongs to this SLURM job; None without SLURM.

    By this subfolder, a job that is queued again finds its run. Lightning writes a checkpoint into it
    when SLURM's signal comes.
    """
    if not SLURMEnvironment.detect():
        return None
    return f"slurm_{os.environ.get('SLURM_JOB_ID')}"


def is_of_job(checkpoint: str | Path) -> bool:
    """Return whether Lightning wrote this checkpoint when SLURM's signal came to this job."""
    return Path(checkpoint).parent.name == job_folder()
