"""Finds the checkpoint that a run starts from: the newest of its name."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME
from lit_knn.common.errors import InputError
from lit_knn.runs.changes import Changes, data_changes, described
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.names import folder_of_name

# A checkpoint with its content.
Start = tuple[Path, dict[str, Any]]


def newest_checkpoint(options: Mapping[str, Any], to_resume: bool) -> Start:
    """Return the newest whole `last.ckpt` of a run's name, model, estimator and data.

    Runs that compare estimators or seeds may share a name. Damaged checkpoints are left out with
    a warning.

    Args:
        options: the configuration of this run, as its config.yaml will have it.
        to_resume: a training goes on, so the seed and the choice of images must agree, too.
    """
    parent = folder_of_name(options["trainer"])
    seed = options["seed_everything"] if to_resume else None

    damaged, of_other_data, of_other_model = 0, "", ""
    paths = [path for path in parent.glob(f"*/{CHECKPOINTS}/{LAST_NAME}") if path.is_file()]
    for path in newest_first(paths):
        run = RunFolder(path.parent.parent)
        if not run.trained(options["model"], seed):
            of_other_model = of_other_model or f"; {run.path} has another model, estimator or seed"
            continue

        different = _data_changes(run, options, to_resume)
        if different:
            of_other_data = of_other_data or f"; {run.path} has other data: {described(different)}"
            continue

        try:
            content = read_training(path, to_resume)
        except InputError as error:
            rank_zero_warn(f"{error}; it is left out")
            damaged += 1
            continue

        # Somebody who forgot an option of the newest run would otherwise go on with an older one.
        rank_zero_info(f"--ckpt_path last: {path}{of_other_model}")
        return path, content

    looked = "none"
    if damaged:
        looked = f"{damaged} damaged"
    same = "name, model, estimator and data"
    if seed is not None:
        same = f"name, model, estimator, data and --seed_everything {seed}"
    needed = f"it needs a whole one of a run with this {same}"
    raise InputError(
        f"--ckpt_path last: found {looked} in {parent}; {needed}{of_other_data or of_other_model}"
    )


def _data_changes(run: RunFolder, options: Mapping[str, Any], trains: bool) -> Changes:
    """Return the options in which the run's data are other data, as far as one can read."""
    try:
        return data_changes(run.config(), options, trains)
    except InputError:
        return {}


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort paths of files or folders by the time of their last change."""
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)
