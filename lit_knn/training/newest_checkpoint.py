"""Finds the newest checkpoint of a run's name, for `--ckpt_path last`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_warn

from lit_knn.errors import InputError
from lit_knn.run_folder import LAST_NAME, config_of_run
from lit_knn.training.checkpoint_io import read_training


def checkpoints_of_name(trainer: Any) -> list[Path]:
    """List the last checkpoints of all versions of a run, the newest first.

    Args:
        trainer: the options of the trainer, with `logger` and `default_root_dir`.
    """
    root = Path(trainer["default_root_dir"] or ".")
    logger = trainer["logger"]
    logger = logger[0] if isinstance(logger, list) and logger else logger
    if logger is False:
        found = [root / "checkpoints" / LAST_NAME]
    else:
        options = (logger.get("init_args") or {}) if hasattr(logger, "get") else {}
        name = options.get("name", "lightning_logs")
        found = list((Path(options.get("save_dir") or root) / (name or "")).glob(f"*/checkpoints/{LAST_NAME}"))
    return sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def of_same_estimator(paths: list[Path], model: Mapping[str, Any]) -> list[Path]:
    """Leave out checkpoints of another model or estimator: runs that compare estimators may share a name.

    Args:
        paths: checkpoints in `RUN/checkpoints`.
        model: class path and arguments of the model.
    """
    return [path for path in paths if _is_of(path.parent.parent, model)]


def newest_whole(paths: list[Path], to_resume: bool) -> Path:
    """Return the first of the checkpoints that can be used, with a warning for each that cannot.

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
    raise InputError(f"--ckpt_path last: found {looked}; it needs {wanted}")


def _is_of(run: Path, model: Mapping[str, Any]) -> bool:
    """Tell whether a run trained this class of model with this estimator, as far as its config.yaml tells."""
    try:
        trained = config_of_run(run)["model"]
        return trained["class_path"] == model["class_path"] and _estimator(trained) == _estimator(model)
    except (InputError, KeyError, TypeError):
        return True


def _estimator(model: Mapping[str, Any]) -> Any:
    return (model.get("init_args") or {}).get("estimator")
