"""Finds the checkpoints that a training run kept, in its own folder and in the folders it was resumed from."""

import re
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_warn

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME, kept_in, read_checkpoint_file
from lit_knn.common.errors import InputError
from lit_knn.runs.folder import CONFIG_NAME, config_of_run, resumed_from

# `lit-knn average` gives its files these names.
AVERAGE_NAME = re.compile(r"ema=(0\.\d+)\.ckpt")
SNAPSHOTS_FOLDER = "snapshots"


def kept_checkpoints(run: str | Path, folder: str | Path | None = None, max_steps: int = -1) -> dict[int, Path]:
    """Find the last checkpoint and the ones that `CheckpointByImages` kept; return paths by the number of images seen.

    If the run was resumed, `ckpt_path` in its config.yaml names the earlier folder; checkpoints there count up to this
    one. `last.ckpt` counts if `max_steps` are done and no other checkpoint has the same number of images.

    Args:
        run: the folder of a training run.
        folder: the folder of its checkpoints, if it is not RUN/checkpoints; earlier folders are then not searched.
        max_steps: length of the training in steps; −1 if it is not known.

    Raises:
        InputError: no checkpoint was found, or a config.yaml is missing or wrong.
    """
    own = Path(run) / CHECKPOINTS if folder is None else Path(folder)
    found = kept_in(own)
    if folder is None:
        found |= {seen: path for seen, path in _before(Path(run)).items() if seen not in found}
    if not found:
        raise InputError(
            f"{own} has no checkpoint that lit_knn.callbacks.CheckpointByImages kept (images_seen=N.ckpt); "
            "add that callback to the training"
        )
    last = _end_of_training(own / LAST_NAME, max_steps)
    if last is not None and last not in found:
        found[last] = own / LAST_NAME
    return dict(sorted(found.items()))


def averages_in(folder: str | Path) -> dict[float, Path]:
    """Find the averages in a folder that `lit-knn average` made; return paths by relative length, ascending."""
    matches = ((AVERAGE_NAME.fullmatch(path.name), path) for path in Path(folder).glob("*.ckpt"))
    return dict(sorted((float(match[1]), path) for match, path in matches if match))


def snapshots_in(folder: Path) -> dict[int, Path]:
    """Find the snapshots of averages in a folder, which `lit_knn.callbacks.PowerAverages` wrote, by the images seen."""
    return dict(sorted(kept_in(folder).items()))


def kept_snapshots(run: str | Path) -> dict[int, Path]:
    """Find the snapshots of averages of a run and of those that it was resumed from; return paths by images seen.

    Raises:
        InputError: there is none, or a config.yaml is missing or wrong.
    """
    config_of_run(run)
    own = Path(run) / SNAPSHOTS_FOLDER
    found = kept_in(own)
    found |= {seen: path for seen, path in _before(Path(run), SNAPSHOTS_FOLDER).items() if seen not in found}
    if not found:
        raise InputError(
            f"{own} has no snapshots of averages, which lit_knn.callbacks.PowerAverages writes; add that callback "
            "to the training"
        )
    return dict(sorted(found.items()))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a training checkpoint. Its tensors are loaded when they are used.

    Raises:
        InputError: the file is damaged or is no training checkpoint.
    """
    checkpoint = read_checkpoint_file(path, mmap=True)
    if not {"state_dict", "images_seen", "global_step"} <= checkpoint.keys():
        raise InputError(f"{path} is no checkpoint of a training")
    return checkpoint


def _before(run: Path, folder: str | None = None) -> dict[int, Path]:
    """Find the checkpoints in the folders that `run` was resumed from, up to the point where it was resumed.

    Args:
        run: the folder of a run.
        folder: name of the folder in that of each run; None for the folder of the checkpoint that was resumed from.
    """
    found: dict[int, Path] = {}
    visited = {run.resolve()}
    while (start := resumed_from(run)) is not None:
        run, checkpoint = Path(start).parent.parent, Path(start)
        if run.resolve() in visited:
            break
        visited.add(run.resolve())
        if not (checkpoint.is_file() and (run / CONFIG_NAME).is_file()):
            rank_zero_warn(f"the run was resumed from {start}, which is not there: what was kept before it is missing")
            break
        try:
            until = int(read_checkpoint(checkpoint)["images_seen"])
        except InputError as error:
            rank_zero_warn(f"the run was resumed from there, but {error}: what was kept before it is missing")
            break
        earlier = kept_in(checkpoint.parent if folder is None else run / folder)
        found |= {seen: path for seen, path in earlier.items() if seen <= until and seen not in found}
    return found


def _end_of_training(path: Path, max_steps: int) -> int | None:
    """Return the images seen in the checkpoint at `path`; None if it cannot be read or training was not finished."""
    if max_steps < 1 or not path.is_file():
        return None
    try:
        checkpoint = read_checkpoint(path)
    except InputError as error:
        rank_zero_warn(f"{error}; it is left out")
        return None
    return int(checkpoint["images_seen"]) if checkpoint["global_step"] >= max_steps else None
