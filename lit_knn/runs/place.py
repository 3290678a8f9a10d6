"""Chooses the folder of a run, `runs/NAME/VERSION`, from the options of the trainer, whatever its logger."""

import contextlib
import os
import pkgutil
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.utilities import rank_zero_only

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME
from lit_knn.common.errors import InputError
from lit_knn.common.tables import keep_aside, read_rows
from lit_knn.runs.folder import CONFIG_NAME, same_model_and_estimator

# These loggers write into folders NAME/VERSION. Other loggers have places of their own.
FILE_LOGGERS = (TensorBoardLogger, CSVLogger)
# A run writes these files before its first step.
WRITTEN_FIRST = (CONFIG_NAME, "hparams.yaml", "events.out.tfevents.*")
DEFAULT_NAME = "lightning_logs"
# Loggers call what groups their runs by one of these options.
NAMES = ("project", "experiment_name", "name")
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def folder_of_name(trainer: Mapping[str, Any]) -> Path:
    """Return the folder of all runs of a name: that of the first TensorBoard or CSV logger, or else `runs/NAME`.

    Args:
        trainer: the options of the trainer, with `logger` and `default_root_dir`.
    """
    root = Path(trainer["default_root_dir"] or ".").expanduser()
    given = trainer["logger"]
    loggers = [logger for logger in (given if isinstance(given, list) else [given]) if hasattr(logger, "get")]
    first = next((logger for logger in loggers if _is_a(logger, FILE_LOGGERS)), None)
    if first is not None:
        options = first.get("init_args") or {}
        folder = Path(options.get("save_dir") or root) / (options.get("name", DEFAULT_NAME) or "")
        # TensorBoard's logger replaces `~` and `$NAME` in its folder, and the CSV logger does not.
        return Path(os.path.expandvars(folder)).expanduser() if _is_a(first, TensorBoardLogger) else folder
    options = (loggers[0].get("init_args") or {}) if loggers else {}
    return root / next((str(options.get(name)) for name in NAMES if options.get(name)), DEFAULT_NAME)


def choose_folder(
    parent: Path, loggers: list[Logger], model: Mapping[str, Any], resumed_from: str | None = None
) -> Path:
    """Choose the folder of a run: `parent/VERSION`.

    VERSION is the logger's, if it is given. A fit that resumes from the `last.ckpt` of a run in `parent`, with the same
    model and estimator, goes on in the folder of that run. Any other run gets a new folder: the class of its estimator
    with a number, such as `one_sample_0`. The first process makes it, so that a run that starts at the same time gets
    another one.

    Args:
        parent: see `folder_of_name`.
        loggers: the loggers of the trainer.
        model: class path and arguments of the model.
        resumed_from: the checkpoint that a fit resumes from, or None.

    Raises:
        InputError: the logger's version is not the name of a folder.
    """
    given = next((version for version in map(_given_version, loggers) if version is not None), None)
    if given is not None:
        if given in ("", "..") or Path(given).name != given:
            raise InputError(f"trainer.logger.version must be the name of a folder, got {given!r:.80}")
        return parent / given
    if resumed_from is not None:
        run = Path(resumed_from).parent.parent
        last = Path(resumed_from).name == LAST_NAME and Path(resumed_from).parent.name == CHECKPOINTS
        here = (run / CONFIG_NAME).is_file() and run.resolve().parent == parent.resolve()
        if last and here and same_model_and_estimator(run, model):
            return parent / run.resolve().name
    others = [Path(logger.root_dir) for logger in loggers if isinstance(logger, FILE_LOGGERS)]
    while True:
        folder = parent / next_version(parent, version_stem(model), *others)
        if rank_zero_only.rank > 0:  # type: ignore[attr-defined]
            return folder  # The trainer tells the other processes which folder the first one has made.
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # Another run has just made it.
            continue
        return folder


def remove_unused(folders: Sequence[Path]) -> None:
    """Remove the folder of a run that did not begin, if it tells no more than how the run was to begin.

    Args:
        folders: the folder of the run, and the folders above it that were made for it, the inmost first.
    """
    files = [path for path in folders[0].rglob("*") if not path.is_dir()]
    if all(any(path.match(pattern) for pattern in WRITTEN_FIRST) for path in files):
        shutil.rmtree(folders[0], ignore_errors=True)
        with contextlib.suppress(OSError):  # A folder with other files stays.
            for folder in folders[1:]:
                folder.rmdir()


def version_stem(model: Mapping[str, Any]) -> str:
    """Return the class of a model's estimator in snake case: `one_sample` for OneSample.

    Without an estimator it is the class of the model: `edm` for LitEDM.
    """
    estimator = (model.get("init_args") or {}).get("estimator")
    named = model if estimator is None or not estimator.get("class_path") else estimator
    return WORDS.sub("_", named["class_path"].rpartition(".")[2]).lower().removeprefix("lit_")


def next_version(parent: Path, stem: str, *others: Path) -> str:
    """Return `stem_N` with the first number above those of the folders in `parent` and in those of other loggers."""
    pattern = re.compile(rf"{re.escape(stem)}_(\d+)")
    names = (path.name for folder in {parent, *others} if folder.is_dir() for path in folder.iterdir())
    numbers = [int(match[1]) for match in map(pattern.fullmatch, names) if match]
    return f"{stem}_{max(numbers, default=-1) + 1}"


def set_version(logger: Logger, version: str, appends: bool) -> None:
    """Make a TensorBoard or CSV logger write to this version, unless it has one; `appends` keeps a CSV's rows.

    Raises:
        InputError: without `appends`, the folder of a CSV logger has the rows of another run.
    """
    if not isinstance(logger, FILE_LOGGERS):
        return
    if logger._version is None:
        logger._version = version
    if isinstance(logger, CSVLogger):
        table = Path(logger.log_dir) / ExperimentWriter.NAME_METRICS_FILE
        if table.exists() and not appends:
            raise InputError(f"{table} has the rows of another run; move it, or give another version")
        if table.exists():
            logger._experiment = AppendingWriter(logger.log_dir)


class AppendingWriter(ExperimentWriter):
    """Lightning's writer of `metrics.csv`; it appends to the rows of an earlier part of the run, not deletes them."""

    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        try:
            rows = read_rows(path)
        except InputError as error:
            keep_aside(path, str(error))
        else:
            self.metrics_keys = list(rows[0]) if rows else []


def _is_a(logger: Any, kinds: type | tuple[type, ...]) -> bool:
    path = logger.get("class_path")
    return path is not None and issubclass(pkgutil.resolve_name(path), kinds)


def _given_version(logger: Logger) -> str | None:
    version = logger._version if isinstance(logger, FILE_LOGGERS) else None
    return version if version is None or isinstance(version, str) else f"version_{version}"
