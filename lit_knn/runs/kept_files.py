"""Finds what a run and its earlier folders keep by images seen: checkpoints, snapshots, averages."""

import re
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_warn

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME, kept_in
from lit_knn.common.errors import InputError
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.folder import RunFolder

SNAPSHOTS_FOLDER = "snapshots"
# `lit-knn average` gives its files these names.
AVERAGE_NAME = re.compile(r"ema=(0\.\d+)\.ckpt")


def kept_checkpoints(
    run: RunFolder, folder: str | Path | None = None, max_steps: int = -1
) -> dict[int, Path]:
    """Return the paths of the checkpoints that `CheckpointByImages` kept, by the images seen.

    `last.ckpt` counts if the training is complete and no other checkpoint has as many images.

    Args:
        run: the run that kept them.
        folder: the folder of the checkpoints. By default it is the run's, and checkpoints of
            earlier folders count up to the one that the run was resumed from.
        max_steps: the steps of a complete training.
    """
    if folder is None:
        place = run.path / CHECKPOINTS
        checkpoints = _of_all_parts(run, CHECKPOINTS)
    else:
        place = Path(folder)
        checkpoints = kept_in(place)

    if not checkpoints:
        advice = "lit_knn.callbacks.CheckpointByImages keeps some"
        raise InputError(f"{place} has no images_seen=N.ckpt; {advice}")

    last = place / LAST_NAME
    if max_steps > 0 and last.is_file():
        try:
            end = read_training(last)
            if end["global_step"] >= max_steps:
                checkpoints.setdefault(int(end["images_seen"]), last)
        except InputError as error:
            rank_zero_warn(f"{error}; it is left out")
    return dict(sorted(checkpoints.items()))


def kept_snapshots(run: RunFolder) -> dict[int, Path]:
    """Return the snapshots of averages of a run and its earlier folders, by images seen."""
    run.config()  # Refuse a folder that is none of a run, before it gets averages.
    snapshots = _of_all_parts(run, SNAPSHOTS_FOLDER)
    if not snapshots:
        folder = run.path / SNAPSHOTS_FOLDER
        advice = "add lit_knn.callbacks.PowerAverages to the training"
        raise InputError(f"{folder} has no snapshots of averages: {advice}")
    return snapshots


def _of_all_parts(run: RunFolder, name: str) -> dict[int, Path]:
    """Return what the run and its earlier folders have in their folders NAME, by images seen.

    Files of an earlier folder count up to the checkpoint from which the run went on.
    """
    files = kept_in(run.path / name)
    for start, earlier in run.before():
        try:
            until = read_training(start).get("images_seen", 0)
        except InputError as error:
            problem = f"the run was resumed from {error}"
            rank_zero_warn(f"{problem}; what was kept before it is missing")
            break

        # The earlier run may have gone on since.
        until = min(until, min(files, default=until))
        for seen, path in kept_in(earlier.path / name).items():
            if seen <= until:
                files.setdefault(seen, path)
    return dict(sorted(files.items()))


def averages_in(folder: str | Path) -> dict[float, Path]:
    """Return the paths of the averages that `lit-knn average` made in a folder.

    They are sorted by relative length, which is their key.
    """
    averages = {}
    for path in Path(folder).glob("*.ckpt"):
        match = AVERAGE_NAME.fullmatch(path.name)
        if match:
            averages[float(match[1])] = path
    return dict(sorted(averages.items()))
