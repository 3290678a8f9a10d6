"""Finds the newest checkpoint of a run's name, for `--ckpt_path last`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_warn

from lit_knn.common.checkpoint_file import LAST_NAME
from lit_knn.common.errors import InputError
from lit_knn.runs.checkpoint_io import read_training
from lit_knn.runs.folder import same_model_and_estimator
from lit_knn.runs.place import folder_of_name


def checkpoints_of_name(trainer: Any) -> list[Path]:
    """List the last checkpoints of all versions of a run, the newest first.

    Args:
        trainer: the options of the trainer, with `logger` and `default_root_dir`.
    """
    found = list(folder_of_name(trainer).glob(f"*/checkpoints/{LAST_NAME}"))
    if trainer["logger"] is False:  # Earlier versions wrote there without a logger.
        found.append(Path(trainer["default_root_dir"] or ".") / "checkpoints" / LAST_NAME)
    return sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def of_same_estimator(paths: list[Path], model: Mapping[str, Any]) -> list[Path]:
    """Leave out checkpoints of another model or estimator: runs that compare estimators may share a name.

    Args:
        paths: checkpoints in `RUN/checkpoints`.
        model: class path and arguments of the model.
    """
    return [path for path in paths if same_model_and_estimator(path.parent.parent, model)]


def newest_whole(paths: list[Path], to_resume: bool, folder: Path) -> Path:
    """Return the first of the checkpoints that can be used, with a warning for each that cannot.

    Args:
        paths: checkpoints.
        to_resume: a fit is to resume from it, see `read_training`.
        folder: where the checkpoints were looked for, for messages.

    Raises:
        InputError: there is none.
    """
    for path in paths:
        try:
            read_training(path, to_resume, mmap=True)
        except InputError as error:
            rank_zero_warn(f"{error}; an older checkpoint is used")
        else:
            return path
    looked = f"{len(paths)} damaged ones" if paths else "none"
    wanted = f"a whole {LAST_NAME} of a run with this name, model and estimator"
    raise InputError(f"--ckpt_path last: found {looked} in {folder}; it needs {wanted}")
