"""Chooses the folder that a run gets: `runs/NAME/VERSION`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME
from lit_knn.runs.folder import CONFIG_NAME, RunFolder, run_of
from lit_knn.runs.lock import is_first_process
from lit_knn.runs.names import Options, folder_of_name, given_version, is_of_job, option_of
from lit_knn.runs.record import RECORD_NAME

# A plan is made for the folder of its training.
TRAININGS = ("fit", "plan")
# Finds the places between the words of a class's name: `UniformSNIS` is `Uniform` and `SNIS`.
BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Request(NamedTuple):
    """A run for which a folder is to be chosen."""

    trainer: Options
    model: Options
    command: str
    checkpoint: str | None  # the path of the checkpoint that the run starts from

    def checkpoint_run(self) -> RunFolder | None:
        """Return the folder of the checkpoint's run if that run has the name of this one, or else None."""
        if self.checkpoint is None:
            return None

        run = RunFolder(run_of(self.checkpoint))
        has_config = (run.path / CONFIG_NAME).is_file()
        if has_config and run.path.parent == folder_of_name(self.trainer).resolve():
            return run
        return None


class Place(NamedTuple):
    """A folder of this name or, if `is_new`, a new folder of this name with a number, `NAME_0`, `NAME_1` and so on."""

    parent: Path
    name: str
    is_new: bool = False

    def folder(self) -> Path:
        """Return the path of the folder; the number of a new one is one above the largest in use."""
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
    """Return the folder of a run by the first of `RULES` that applies, or else a new folder.

    The first process also makes the folder, except for a plan.

    Args:
        trainer: the options of the trainer.
        model: the class and the options of the model.
        command: the command, such as `fit`.
        checkpoint: the path of the checkpoint that the run starts from, or None.
    """
    request = Request(trainer, model, command, checkpoint)
    place = _place_by_rules(request)
    if command == "plan" or not is_first_process():
        return RunFolder(place.folder())
    return _made(place)


def _place_by_rules(request: Request) -> Place:
    """Return the place by the first of `RULES` that applies, or else a new folder."""
    for rule in RULES:
        place = rule(request)
        if place is not None:
            return place
    return _new_folder(request)


def _version_of_logger(request: Request) -> Place | None:
    """Return the folder that the version of a TensorBoard or CSV logger names, or None without a version.

    With the config.yaml of a training, `validate` and `predict` get that training's version, too. They must not write
    into its folder, because its tables would then have rows of another checkpoint.
    """
    version = given_version(request.trainer)
    if version is None:
        return None

    place = Place(folder_of_name(request.trainer), version)
    trains = request.command in TRAININGS
    if not trains and (place.folder() / RECORD_NAME).is_file():
        return None
    return place


def _folder_of_predictions(request: Request) -> Place | None:
    """Return a new folder in that of the checkpoint's run, for a `predict` from a run of this name, or else None."""
    run = request.checkpoint_run()
    if request.command != "predict" or run is None:
        return None
    return Place(folder_of_name(request.trainer) / run.path.name, "predict", is_new=True)


def _folder_of_resumed_run(request: Request) -> Place | None:
    """Return the folder of the run that a `fit` or `plan` resumes, or None.

    That run must have this run's name, model and estimator. The checkpoint must be its `last.ckpt`, or
    the one that was written at SLURM's signal before the job was queued again. From any other
    checkpoint, a new run begins.
    """
    run = request.checkpoint_run()
    if request.command not in TRAININGS or request.checkpoint is None or run is None:
        return None

    checkpoint = Path(request.checkpoint)
    is_last = checkpoint.parent.name == CHECKPOINTS and checkpoint.name == LAST_NAME
    resumes = is_last or is_of_job(checkpoint)
    if resumes and run.trained(request.model):
        return Place(folder_of_name(request.trainer), run.path.name)
    return None


def _new_folder(request: Request) -> Place:
    """Return a new folder, whose name is the class of the estimator with a number, such as `one_sample_0`."""
    return Place(folder_of_name(request.trainer), version_stem(request.model), is_new=True)


RULES: tuple[Callable[[Request], Place | None], ...] = (
    _version_of_logger,
    _folder_of_predictions,
    _folder_of_resumed_run,
)


def version_stem(model: Options) -> str:
    """Return the class of a model's estimator, or of a model without one, in snake case.

    For example, it is `one_sample` for OneSample, and `edm` for LitEDM.
    """
    named = model
    estimator = option_of(model, "estimator")
    if estimator is not None and estimator.get("class_path"):
        named = estimator

    class_name = named["class_path"].rpartition(".")[2]
    return BETWEEN_WORDS.sub("_", class_name).lower().removeprefix("lit_")


def _made(place: Place) -> RunFolder:
    """Make the folder of a place, and return it with all folders that were made for it."""
    while True:
        folder = place.folder()
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        place.parent.mkdir(parents=True, exist_ok=True)

        try:
            folder.mkdir(exist_ok=not place.is_new)
        except FileExistsError:
            if not place.is_new:  # A file has this name.
                raise
            continue  # Another run has just made this folder, so the next number is tried.
        return RunFolder(folder, tuple(missing))
