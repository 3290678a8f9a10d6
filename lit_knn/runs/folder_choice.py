"""Chooses the folder that a run gets: `runs/NAME/VERSION`."""

import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME
from lit_knn.common.errors import InputError
from lit_knn.common.files import at_home
from lit_knn.runs.folder import CONFIG_NAME, RunFolder, estimator_options
from lit_knn.runs.job import is_first_process, is_of_job

# These loggers write into folders NAME/VERSION. Other loggers have places of their own.
FILE_LOGGERS = (TensorBoardLogger, CSVLogger)
DEFAULT_NAME = "lightning_logs"
# Loggers call what groups their runs by one of these options.
NAMES = ("project", "experiment_name", "name")
# The places between the words of a class's name: `UniformSNIS` is `Uniform` and `SNIS`.
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """What decides on the folder of a run."""

    trainer: Options
    model: Options
    command: str
    checkpoint: str | None  # that the run starts from

    def checkpoint_run(self) -> RunFolder | None:
        """Return the run of the checkpoint, or None if it is none of this run's name."""
        if self.checkpoint is None:
            return None

        run = RunFolder(Path(self.checkpoint).parent.parent)
        has_config = (run.path / CONFIG_NAME).is_file()
        if has_config and run.path.resolve().parent == folder_of_name(self.trainer).resolve():
            return run
        return None


@dataclass(frozen=True)
class Place:
    """Where a run writes: a folder of this name, or a new one, `NAME_0`, `NAME_1` and so on."""

    parent: Path
    name: str
    numbered: bool = False

    def folder(self) -> Path:
        """Return the path of the folder; a number is one above those that are in use."""
        if not self.numbered:
            return self.parent / self.name

        number = 0
        for path in self.parent.glob("*"):
            match = re.fullmatch(rf"{re.escape(self.name)}_(\d+)", path.name)
            if match:
                number = max(number, int(match[1]) + 1)
        return self.parent / f"{self.name}_{number}"


def choose_folder(
    trainer: Options, model: Options, command: str = "fit", checkpoint: str | None = None
) -> RunFolder:
    """Choose the folder of a run: where the first of `RULES` says, or else a new one.

    The first process makes it, but not for a plan.

    Args:
        trainer: the options of the trainer.
        model: the class and the options of the model.
        command: what the run does, such as `fit`.
        checkpoint: the one that the run starts from, if any.
    """
    place = _place(Request(trainer, model, command, checkpoint))
    if command == "plan" or not is_first_process():
        return RunFolder(place.folder())
    return _made(place)


def _place(request: Request) -> Place:
    for rule in RULES:
        place = rule(request)
        if place is not None:
            return place

    stem = version_stem(request.model)
    return Place(folder_of_name(request.trainer), stem, numbered=True)


def _version_of_logger(request: Request) -> Place | None:
    """A TensorBoard or CSV logger that has a version names the folder."""
    version = given_version(request.trainer)
    if version is None:
        return None
    return Place(folder_of_name(request.trainer), version)


def _folder_of_predictions(request: Request) -> Place | None:
    """A `predict` with a checkpoint of a run of this name writes into that run's folder."""
    run = request.checkpoint_run()
    if request.command != "predict" or run is None:
        return None
    parent = folder_of_name(request.trainer) / run.path.resolve().name
    return Place(parent, "predict", numbered=True)


def _folder_of_resumed_run(request: Request) -> Place | None:
    """A fit that resumes a run of this name, with its model and estimator, goes on in its folder.

    It resumes from `last.ckpt`, or from the checkpoint of SLURM's signal if the job is queued
    again. From any other checkpoint a new run branches off.
    """
    run = request.checkpoint_run()
    if request.command not in ("fit", "plan") or request.checkpoint is None or run is None:
        return None

    is_last = Path(request.checkpoint) == run.path / CHECKPOINTS / LAST_NAME
    goes_on = is_last or is_of_job(request.checkpoint)
    if goes_on and run.trained(request.model):
        return Place(folder_of_name(request.trainer), run.path.resolve().name)
    return None


# The first rule that fits says where a run writes. If none fits, it gets a new folder: the class
# of its estimator with a number, such as `one_sample_0`.
RULES: tuple[Callable[[Request], Place | None], ...] = (
    _version_of_logger,
    _folder_of_predictions,
    _folder_of_resumed_run,
)


def _made(place: Place) -> RunFolder:
    """Make the folder of a place, and note which folders were missing."""
    while True:
        folder = place.folder()
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        place.parent.mkdir(parents=True, exist_ok=True)

        try:
            folder.mkdir(exist_ok=not place.numbered)
        except FileExistsError:
            if not place.numbered:  # It is a file.
                raise
            continue  # Another run has just made it.
        return RunFolder(folder, tuple(missing))


def folder_of_name(trainer: Options) -> Path:
    """Return the folder of all runs of a name.

    It is that of the first TensorBoard or CSV logger, or else `runs/NAME`.
    """
    root = trainer["default_root_dir"] or "."
    file_loggers = _logger_options(trainer, FILE_LOGGERS)
    if file_loggers:
        options = file_loggers[0]
        name = options.get("name", DEFAULT_NAME)
        return expanded(options.get("save_dir", root)) / (name or "")

    for options in _logger_options(trainer)[:1]:
        for option in NAMES:
            name = options.get(option)
            if name:
                return expanded(root) / str(name)
    return expanded(root) / DEFAULT_NAME


def expanded(path: str | os.PathLike[str]) -> Path:
    """Replace `~` and `$NAME` in a path, as TensorBoard's logger does; the CSV logger does not."""
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


def version_stem(model: Options) -> str:
    """Return the class of a model's estimator, or of the model, in snake case.

    It is `one_sample` for OneSample, and `edm` for LitEDM.
    """
    named = model
    estimator = estimator_options(model)
    if estimator is not None and estimator.get("class_path"):
        named = estimator

    class_name = named["class_path"].rpartition(".")[2]
    return WORDS.sub("_", class_name).lower().removeprefix("lit_")


def _logger_options(trainer: Options, kinds: tuple[type, ...] = (object,)) -> list[Options]:
    """Return the arguments of the loggers of some kinds."""
    loggers = trainer["logger"]
    if not isinstance(loggers, list):
        loggers = [loggers]

    arguments = []
    for logger in loggers:
        # `true` and `false` name no class.
        if not hasattr(logger, "get"):
            continue
        if issubclass(pkgutil.resolve_name(logger["class_path"]), kinds):
            arguments.append(logger.get("init_args") or {})
    return arguments
