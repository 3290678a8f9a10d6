"""The folder of a training run: which one a run gets, who may write into it, and what is in it."""

import contextlib
import fcntl
import os
import pkgutil
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME, hint_of_runs, kept_in
from lit_knn.common.errors import InputError
from lit_knn.common.files import at_home
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.job import is_first_process, is_of_job
from lit_knn.runs.record import RECORD_NAME, read_record

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.csv"
LOCK_NAME = ".lock"
SNAPSHOTS_FOLDER = "snapshots"
# These loggers write into folders NAME/VERSION. Other loggers have places of their own.
FILE_LOGGERS = (TensorBoardLogger, CSVLogger)
DEFAULT_NAME = "lightning_logs"
# Loggers call what groups their runs by one of these options.
NAMES = ("project", "experiment_name", "name")
# A run writes these files before its first step.
WRITTEN_FIRST = (CONFIG_NAME, RECORD_NAME, LOCK_NAME, "hparams.yaml", "events.out.tfevents.*")
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# `lit-knn average` gives its files these names.
AVERAGE_NAME = re.compile(r"ema=(0\.\d+)\.ckpt")

Options = Mapping[str, Any]
# The locks of this process; the system frees them when it ends.
_locks: list[Any] = []


@dataclass(frozen=True)
class RunFolder:
    """The folder of a training run."""

    path: Path  # runs/NAME/VERSION
    made: tuple[Path, ...] = ()  # the folders that were made for this run, the inmost first

    def config(self, name: str = CONFIG_NAME) -> dict[str, Any]:
        """Read a configuration; raise InputError if it is missing or not that of a training run."""
        path = self.path / name
        if not path.is_file():
            hint = hint_of_runs(self.path) or "; give the folder of a training run, as runs/x/knn_0"
            raise InputError(f"{path} does not exist{hint}")
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
        if not isinstance(config, dict) or not {"model", "data", "trainer"} <= config.keys():
            raise InputError(f"{path} is not the configuration of a training run")
        return config

    def earlier(self, name: str) -> list[Path]:
        """List the files `STEM_N.SUFFIX` of earlier parts of the run that went on in this folder, the first one first.

        `name` is that of the latest part's file, such as `config.yaml`.
        """
        stem, suffix = os.path.splitext(name)
        pattern = re.compile(rf"{re.escape(stem)}_(\d+){re.escape(suffix)}")
        found = {
            int(match[1]): path
            for path in self.path.glob("*")
            if (match := pattern.fullmatch(path.name))
        }
        return [found[number] for number in sorted(found)]

    def start(self) -> str | None:
        """Return the checkpoint in another folder that the run was resumed from, or None."""
        for name in (CONFIG_NAME, *(path.name for path in reversed(self.earlier(CONFIG_NAME)))):
            start = self.config(name).get("ckpt_path")
            if start is None or not self.holds(start):
                return start
        return None

    def before(self) -> Iterator[tuple[Path, "RunFolder"]]:
        """Yield the checkpoints in other folders that the parts of the run were resumed from, and those folders.

        The latest comes first. A folder without a configuration is the last one.
        """
        run, visited = self, {self.path.resolve()}
        while (run.path / CONFIG_NAME).is_file() and (start := run.start()) is not None:
            run = RunFolder(Path(start).parent.parent)
            if run.path.resolve() in visited:
                return
            visited.add(run.path.resolve())
            yield Path(start), run

    def parts(self) -> list[Path]:
        """List the folders of the run, from that of its first part that is still there to this one."""
        found = [self.path]
        for start, run in self.before():
            if (run.path / RECORD_NAME).is_file():
                found.append(run.path)
            else:
                rank_zero_warn(
                    f"{self.path} was resumed from {start}, whose run is not there: its part is left out"
                )
        return found[::-1]

    def holds(self, checkpoint: str | Path) -> bool:
        """Tell whether a checkpoint is one of this run's own, in `checkpoints`."""
        return Path(checkpoint).parent.parent.resolve() == self.path.resolve()

    def trained(self, model: Mapping[str, Any], seed: int | None = None) -> bool:
        """Tell whether the run trained this model with this estimator, and `seed` if given, as far as one can read."""
        try:
            config = self.config()
            own = config["model"]
            same = own["class_path"] == model["class_path"] and _estimator(own) == _estimator(model)
        except (InputError, KeyError, TypeError):
            return True
        return same and seed in (None, config.get("seed_everything", seed))

    def kept_checkpoints(
        self, folder: str | Path | None = None, max_steps: int = -1
    ) -> dict[int, Path]:
        """Find the checkpoints that `CheckpointByImages` kept, and the last one; return paths by the images seen.

        If the run was resumed, checkpoints of the earlier folders count up to the one that it was resumed from, unless
        the folder of the checkpoints is given. `last.ckpt` counts if `max_steps` are done and no other checkpoint has
        the same number of images.
        """
        own = self.path / CHECKPOINTS if folder is None else Path(folder)
        found = self._kept(CHECKPOINTS) if folder is None else kept_in(own)
        if not found:
            raise InputError(
                f"{own} has no images_seen=N.ckpt; lit_knn.callbacks.CheckpointByImages keeps some"
            )
        last = own / LAST_NAME
        if max_steps > 0 and last.is_file():
            try:
                end = read_training(last)
                if end["global_step"] >= max_steps:
                    found.setdefault(int(end["images_seen"]), last)
            except InputError as error:
                rank_zero_warn(f"{error}; it is left out")
        return dict(sorted(found.items()))

    def kept_snapshots(self) -> dict[int, Path]:
        """Find the snapshots of averages of this run and of those that it was resumed from, by the images seen."""
        self.config()  # Refuse a folder that is none of a run, before it gets averages.
        found = self._kept(SNAPSHOTS_FOLDER)
        if not found:
            advice = "add lit_knn.callbacks.PowerAverages to the training"
            raise InputError(
                f"{self.path / SNAPSHOTS_FOLDER} has no snapshots of averages: {advice}"
            )
        return found

    def _kept(self, name: str) -> dict[int, Path]:
        """Find what the run kept in its folder NAME, and the earlier folders up to where it went on; ascending."""
        found = kept_in(self.path / name)
        for start, run in self.before():
            try:
                until = read_training(start).get("images_seen", 0)
            except InputError as error:
                rank_zero_warn(
                    f"the run was resumed from {error}; what was kept before it is missing"
                )
                break
            # The earlier run may have gone on since.
            until = min([until, *found])
            earlier = {
                seen: path for seen, path in kept_in(run.path / name).items() if seen <= until
            }
            found = {**earlier, **found}
        return dict(sorted(found.items()))

    def lock(self) -> None:
        """Keep other processes from training in this folder as long as this process lives."""
        file = (self.path / LOCK_NAME).open("a")
        try:
            # Unlike flock, this lock is not shared with processes that a loader of data forks.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            advice = "wait until it ends, or give another --trainer.logger.version"
            raise InputError(
                f"{self.path}: another process trains in this folder; {advice}"
            ) from error
        except OSError:
            pass  # This file system knows no locks.
        _locks.append(file)

    def keep_earlier(self, name: str) -> Path | None:
        """Rename a file of the part before this one to `STEM_N.SUFFIX`, N above those there; return the new path."""
        path = self.path / name
        if not path.is_file():
            return None
        numbers = [int(earlier.stem.rpartition("_")[2]) for earlier in self.earlier(name)]
        return path.rename(path.with_stem(f"{path.stem}_{max(numbers, default=-1) + 1}"))

    def remove_unused(self) -> None:
        """Remove the folders that were made for a run that did not begin, if they hold no more than its settings."""
        files = [path for path in self.path.rglob("*") if not path.is_dir()]
        if (
            self.made
            and not self._has_trained()
            and all(any(path.match(pattern) for pattern in WRITTEN_FIRST) for path in files)
        ):
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # A folder with other files stays.
                for folder in self.made[1:]:
                    folder.rmdir()

    def _has_trained(self) -> bool:
        """Tell whether the record of the run has a step, as far as one can read."""
        if not (self.path / RECORD_NAME).is_file():
            return False
        try:
            return read_record(self.path).step > 0
        except InputError:
            return True


def folder_of_name(trainer: Mapping[str, Any]) -> Path:
    """Return the folder of all runs of a name: that of the first TensorBoard or CSV logger, or else `runs/NAME`."""
    root = trainer["default_root_dir"] or "."
    for options in _loggers(trainer, FILE_LOGGERS):
        return expanded(options.get("save_dir", root)) / (options.get("name", DEFAULT_NAME) or "")
    options = next(iter(_loggers(trainer)), {})
    return expanded(root) / next(
        (str(options.get(name)) for name in NAMES if options.get(name)), DEFAULT_NAME
    )


def expanded(path: str | os.PathLike[str]) -> Path:
    """Replace `~` and `$NAME` in a path, as TensorBoard's logger does; the CSV logger does not."""
    return Path(at_home(os.path.expandvars(path)))


def choose_folder(
    trainer: Options, model: Options, command: str = "fit", checkpoint: str | None = None
) -> RunFolder:
    """Choose the folder of a run, from the options of its trainer and its model.

    VERSION is that of a TensorBoard or CSV logger, if it is given. A fit that resumes from the
    `last.ckpt` of a run of this name, with the same model and estimator, goes on in the folder of
    that run. So does a job that SLURM has queued again. A `predict` with a checkpoint of a run of
    this name gets a folder `predict_N` in that run's folder. Any other run gets a new folder: the
    class of its estimator with a number, such as `one_sample_0`. The first process makes it, but
    not for a plan.
    """
    parent, version, stem = folder_of_name(trainer), given_version(trainer), version_stem(model)
    if version is None and checkpoint is not None and command in ("fit", "plan", "predict"):
        run = RunFolder(Path(checkpoint).parent.parent)
        here = (run.path / CONFIG_NAME).is_file() and run.path.resolve().parent == parent.resolve()
        goes_on = Path(checkpoint) == run.path / CHECKPOINTS / LAST_NAME or is_of_job(checkpoint)
        if here and command == "predict":
            parent, stem = parent / run.path.resolve().name, command
        elif here and goes_on and run.trained(model):
            version = run.path.resolve().name

    pattern = re.compile(rf"{re.escape(stem)}_(\d+)")
    while True:
        numbers = [
            int(match[1]) for path in parent.glob("*") if (match := pattern.fullmatch(path.name))
        ]
        folder = parent / (version or f"{stem}_{max(numbers, default=-1) + 1}")
        if command == "plan" or not is_first_process():
            return RunFolder(folder)
        made = tuple(path for path in (folder, *folder.parents) if not path.exists())
        parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(exist_ok=version is not None)
            return RunFolder(folder, made)
        except FileExistsError:  # Another run has just made it, or it is a file.
            if version is not None:
                raise


def given_version(trainer: Options) -> str | None:
    """Return the name of the folder that a TensorBoard or CSV logger gives to the run, or None."""
    versions = (options.get("version") for options in _loggers(trainer, FILE_LOGGERS))
    version = next((value for value in versions if value is not None), None)
    if version is None:
        return None
    name = version if isinstance(version, str) else f"version_{version}"
    if name in ("", "..") or Path(name).name != name:
        raise InputError(f"trainer.logger.version must be the name of a folder, got {name!r:.80}")
    return name


def averages_in(folder: str | Path) -> dict[float, Path]:
    """Find the averages in a folder that `lit-knn average` made; return paths by relative length, ascending."""
    matches = ((AVERAGE_NAME.fullmatch(path.name), path) for path in Path(folder).glob("*.ckpt"))
    return dict(sorted((float(match[1]), path) for match, path in matches if match))


def version_stem(model: Mapping[str, Any]) -> str:
    """Return the class of a model's estimator, or of the model, in snake case: `one_sample`, or `edm` for LitEDM."""
    estimator = _estimator(model)
    named = model if estimator is None or not estimator.get("class_path") else estimator
    return WORDS.sub("_", named["class_path"].rpartition(".")[2]).lower().removeprefix("lit_")


def _loggers(
    trainer: Mapping[str, Any], kinds: tuple[type, ...] = (object,)
) -> list[Mapping[str, Any]]:
    """Return the arguments of the loggers of some kinds."""
    given = trainer["logger"]
    loggers = [
        each for each in (given if isinstance(given, list) else [given]) if hasattr(each, "get")
    ]
    chosen = [
        each for each in loggers if issubclass(pkgutil.resolve_name(each["class_path"]), kinds)
    ]
    return [each.get("init_args") or {} for each in chosen]


def _estimator(model: Mapping[str, Any]) -> Any:
    return (model.get("init_args") or {}).get("estimator")
