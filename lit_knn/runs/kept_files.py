"""Finds the checkpoints and snapshots that a run and its earlier folders keep by images seen, and its averages."""

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

    `last.ckpt` is one of them if the training is complete and no other checkpoint has seen as many images.

    Args:
        run: the folder of the run.
        folder: the folder of the checkpoints. By default it is that of the run; the checkpoints in
            earlier folders are then found, too, up to the one that the run was resumed from.
        max_steps: the steps of a complete training; -1 if they are not known.
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
            content = read_training(last)
            if content["global_step"] >= max_steps:
                checkpoints.setdefault(int(content["images_seen"]), last)
        except InputError as error:
            rank_zero_warn(f"{error}; it is left out")
    return dict(sorted(checkpoints.items()))


def kept_snapshots(run: RunFolder) -> dict[int, Path]:
    """Return the paths of the snapshots of averages of a run and its earlier folders, by images seen."""
    run.config()  # Called for the error that it raises if the folder is not that of a run.
    snapshots = _of_all_parts(run, SNAPSHOTS_FOLDER)
    if not snapshots:
        folder = run.path / SNAPSHOTS_FOLDER
        advice = "add lit_knn.callbacks.PowerAverages to the training"
        raise InputError(f"{folder} has no snapshots of averages: {advice}")
    return snapshots


def _of_all_parts(run: RunFolder, name: str) -> dict[int, Path]:
    """Return the files by images seen in the subfolders of this name of a run and its earlier folders.

    Of an earlier folder, the files count up to the checkpoint that the run was resumed from.
    """
    files = kept_in(run.path / name)
    for start, earlier in run.before():
        try:
            until = read_training(start).get("images_seen", 0)
        except InputError as error:
            problem = f"the run was resumed from {error}"
            rank_zero_warn(f"{problem}; what was kept before it is missing")
            break

        # The earlier run may have gone on, and replaced this checkpoint by one of more images. But the files of the
        # later folders were all kept after the run was resumed, so they are a limit, too.
        until = min(until, min(files, default=until))
        for seen, path in kept_in(earlier.path / name).items():
            if seen <= until:
                files.setdefault(seen, path)
    return dict(sorted(files.items()))


def averages_in(folder: str | Path) -> dict[float, Path]:
    """Return the paths of the averages that `lit-knn average` made in a folder, by relative length, ascending."""
    averages = {}
    for path in Path(folder).glob("*.ckpt"):
        match = AVERAGE_NAME.fullmatch(path.name)
        if match:
            averages[float(match[1])] = path
    return dict(sorted(averages.items()))
