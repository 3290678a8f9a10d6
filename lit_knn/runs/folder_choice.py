"""Chooses the folder that a run gets: `runs/NAME/VERSION`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME
from lit_knn.runs.folder import CONFIG_NAME, RunFolder
from lit_knn.runs.lock import is_first_process
from lit_knn.runs.names import Options, folder_of_name, given_version, is_of_job, option_of

# The places between the words of a class's name: `UniformSNIS` is `Uniform` and `SNIS`.
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Request(NamedTuple):
    """What decides on the folder of a run."""

    trainer: Options
    model: Options
    command: str
    checkpoint: str | None  # that the run starts from

    def checkpoint_run(self) -> RunFolder | None:
        """Return the run of the checkpoint, or None if it is none of this run's name."""
        if self.checkpoint is None:
            return None

        run = RunFolder(Path(self.checkpoint).parent.parent.resolve())
        has_config = (run.path / CONFIG_NAME).is_file()
        if has_config and run.path.parent == folder_of_name(self.trainer).resolve():
            return run
        return None


class Place(NamedTuple):
    """A folder: the one of this name, or a new one, `NAME_0`, `NAME_1` and so on."""

    parent: Path
    name: str
    is_new: bool = False

    def folder(self) -> Path:
        """Return the path; the number of a new folder is one above those that are in use."""
        if not self.is_new:
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
    """Choose the folder of a run: where the first of `RULES` says that fits.

    The first process makes it, but not for a plan.

    Args:
        trainer: the options of the trainer.
        model: the class and the options of the model.
        command: what the run does, such as `fit`.
        checkpoint: the one that the run starts from, if any.
    """
    request = Request(trainer, model, command, checkpoint)
    places = (rule(request) for rule in RULES)
    place = next(place for place in places if place is not None)

    if command == "plan" or not is_first_process():
        return RunFolder(place.folder())
    return _made(place)


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
    return Place(folder_of_name(request.trainer) / run.path.name, "predict", is_new=True)


def _folder_of_resumed_run(request: Request) -> Place | None:
    """A fit that resumes a run of this name, with its model and estimator, goes on in its folder.

    It resumes from `last.ckpt`, or from the checkpoint of SLURM's signal if the job is queued
    again. From any other checkpoint a new run branches off.
    """
    run = request.checkpoint_run()
    if request.command not in ("fit", "plan") or request.checkpoint is None or run is None:
        return None

    checkpoint = Path(request.checkpoint)
    is_last = (checkpoint.parent.name, checkpoint.name) == (CHECKPOINTS, LAST_NAME)
    goes_on = is_last or is_of_job(checkpoint)
    if goes_on and run.trained(request.model):
        return Place(folder_of_name(request.trainer), run.path.name)
    return None


def _new_folder(request: Request) -> Place:
    """A new run gets a new folder: the class of its estimator with a number, `one_sample_0`."""
    return Place(folder_of_name(request.trainer), version_stem(request.model), is_new=True)


RULES: tuple[Callable[[Request], Place | None], ...] = (
    _version_of_logger,
    _folder_of_predictions,
    _folder_of_resumed_run,
    _new_folder,
)


def version_stem(model: Options) -> str:
    """Return the class of a model's estimator, or of the model, in snake case.

    It is `one_sample` for OneSample, and `edm` for LitEDM.
    """
    named = model
    estimator = option_of(model, "estimator")
    if estimator is not None and estimator.get("class_path"):
        named = estimator

    class_name = named["class_path"].rpartition(".")[2]
    return WORDS.sub("_", class_name).lower().removeprefix("lit_")


def _made(place: Place) -> RunFolder:
    """Make the folder of a place, and note which folders were missing."""
    while True:
        folder = place.folder()
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        place.parent.mkdir(parents=True, exist_ok=True)

        try:
            folder.mkdir(exist_ok=not place.is_new)
        except FileExistsError:
            if not place.is_new:  # It is a file.
                raise
            continue  # Another run has just made it.
        return RunFolder(folder, tuple(missing))
