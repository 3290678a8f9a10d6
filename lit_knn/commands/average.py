"""`lit-knn average RUN --ema LENGTH...` makes averages of the weights of a run after its training.

An average is a weighted sum of the snapshots of `PowerAverages`. The weights are those whose profile is nearest to the
wanted one (arXiv 2312.02696, Sec. 3.2).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lit_knn.commands.power_profiles import Fit, Profile, fit
from lit_knn.common.checkpoint_file import read_checkpoint_file
from lit_knn.common.errors import InputError, prefixed
from lit_knn.modules.power_averages import checked_lengths, exponent
from lit_knn.runs.checkpoints import AVERAGE_KEY, WholeCheckpointIO
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.kept_files import kept_snapshots

AVERAGES_FOLDER = "averages"
# Above the first limit of the profile's error, an average is written with a warning; above the second, it is refused.
WARNED, REFUSED = 0.05, 0.3


class Snapshot(TypedDict):
    """The entries of a snapshot's file from which averages are made; it has the other entries of a checkpoint, too."""

    images_seen: int
    lengths: list[float]  # the relative length of each average
    averages: list[dict[str, Tensor]]  # the state of the network, averaged over each length


def average(snapshots: Sequence[Snapshot], weights: np.ndarray) -> dict[str, Tensor]:
    """Return the weighted sum of the averages in snapshots, which is a state of the network.

    The sum is made in float64, and becomes float32 if tensors have fewer bits. Integers are those of the last average.

    Args:
        snapshots: the snapshots.
        weights: a weight for each average of each snapshot, in their order.
    """
    averages: list[dict[str, Tensor]] = []
    for snapshot in snapshots:
        averages += snapshot["averages"]

    summed = {}
    for name, last in averages[-1].items():
        if not (last.is_floating_point() or last.is_complex()):
            summed[name] = last
            continue

        wide = torch.promote_types(last.dtype, torch.float64)  # complex128 of complex numbers
        total = torch.zeros(last.shape, dtype=wide)
        for weight, each in zip(weights, averages, strict=True):
            total.add_(each[name].to(wide), alpha=float(weight))
        is_short = last.element_size() < torch.float32.itemsize
        summed[name] = total.to(torch.float32 if is_short else last.dtype)
    return summed


def fit_length(snapshots: Sequence[Snapshot], length: float) -> Fit:
    """Return the weights of the sum of snapshots that is nearest to the average of a relative length at the last one.

    Raises:
        InputError: even the nearest sum has too large an error.
    """
    stored = []
    for snapshot in snapshots:
        for stored_length in snapshot["lengths"]:
            stored.append(Profile(exponent(stored_length), snapshot["images_seen"]))

    last = snapshots[-1]
    fitted = fit(stored, Profile(exponent(length), last["images_seen"]))
    nearest = (
        f"the nearest sum of {len(snapshots)} snapshot(s) has an error of {fitted.residual:.0%}"
    )
    problem = f"--ema {length:g}: {nearest}"
    advice = f"stored are the lengths {last['lengths']}; a smaller every_n_images reaches further"
    if fitted.residual > REFUSED:
        raise InputError(f"{problem}, above {REFUSED:.0%}; {advice}")
    if fitted.residual > WARNED:
        rank_zero_warn(f"{problem}; {advice}")
    return fitted


def write_averages(
    run: Path, lengths: Sequence[float], images: int | None = None, folder: Path | None = None
) -> None:
    """Write averages of the weights of a run, each into a checkpoint, and print the paths.

    Args:
        run: folder of the run; its last folder, if it was resumed.
        lengths: relative lengths of the averages.
        images: average up to the snapshot of this number of images seen; by default up to the last one.
        folder: folder of the checkpoints; by default `averages/` in the run's folder.

    Raises:
        InputError: no sum of snapshots is near to a length, or its file holds another average.
    """
    with prefixed("--ema"):
        lengths = checked_lengths(lengths)
    if folder is None:
        folder = run / AVERAGES_FOLDER

    snapshots = read_snapshots(run, images)
    last = snapshots[-1]
    fits = [fit_length(snapshots, length) for length in lengths]
    seen = f"up to {last['images_seen']:,} images seen"
    print(f"{len(snapshots)} snapshots, {seen}, of the lengths {last['lengths']}")

    planned = []
    for length, fitted in zip(lengths, fits, strict=True):
        path = folder / f"ema={_spell(length)}.ckpt"
        about = {"length": length, "residual": fitted.residual, "snapshots": len(snapshots)}
        if path.exists():
            _check_same_average(path, about, last["images_seen"])
        planned.append((path, about, fitted))

    written = 0
    for path, about, fitted in planned:
        # If the command was interrupted before, it writes only the files that are missing.
        exists = path.exists()
        if not exists:
            _write_average(path, about, snapshots, fitted.weights)
            written += 1
        state = ", is there already" if exists else ""
        print(f"{path}: error of the profile {fitted.residual:.2g}{state}")
    print(f"Written: {written} average(s), into {folder}")


def read_snapshots(run: Path, images: int | None) -> list[Snapshot]:
    """Return the snapshots of a run up to the one of `images` images seen, or all; tensors are loaded when used."""
    paths = kept_snapshots(RunFolder(run))
    if images is not None and images not in paths:
        by_distance = sorted(paths, key=lambda seen: abs(seen - images))
        nearest = ", ".join(str(seen) for seen in by_distance[:3])
        raise InputError(f"--images {images}: there is no such snapshot; the nearest are {nearest}")

    chosen = [path for seen, path in paths.items() if images is None or seen <= images]
    return [cast(Snapshot, read_checkpoint_file(path, mmap=True)) for path in chosen]


def _spell(length: float) -> str:
    """Return a length as text for a file's name, with at least three digits after the point, such as 0.050."""
    rounded = f"{length:.3f}"
    return rounded if float(rounded) == length else repr(length)


def _check_same_average(path: Path, about: dict[str, float], images_seen: int) -> None:
    """Raise InputError if a file holds another average than the one to write, whose description is `about`."""
    checkpoint = read_checkpoint_file(path, mmap=True)
    if checkpoint.get(AVERAGE_KEY) != about or checkpoint.get("images_seen") != images_seen:
        problem = f"{path} is another average; nothing is overwritten"
        raise InputError(f"{problem}, give another --output")


def _write_average(
    path: Path, about: dict[str, float], snapshots: Sequence[Snapshot], weights: np.ndarray
) -> None:
    """Write the checkpoint of an average for `validate` and `predict`; a training cannot resume from it.

    Args:
        path: path of the file.
        about: length, residual and number of snapshots of the average.
        snapshots: the snapshots.
        weights: a weight for each average of each snapshot.
    """
    checkpoint: dict[str, object] = {**snapshots[-1]}
    del checkpoint["lengths"], checkpoint["averages"]
    checkpoint["state_dict"] = average(snapshots, weights)
    checkpoint[AVERAGE_KEY] = about
    WholeCheckpointIO().save_checkpoint(checkpoint, path)


def main(args: Sequence[str] | None = None) -> None:
    """Run `lit-knn average` with the arguments of a command line."""
    about = "Make averages of the weights of a run after its training, of any length, from the snapshots of "
    about += "lit_knn.callbacks.PowerAverages. `validate` and `predict --ckpt_path` take them. See docs/training.md."
    parser = argparse.ArgumentParser(prog="lit-knn average", description=about)
    about = "folder of a run; if it was resumed, the last folder"
    parser.add_argument("run", metavar="RUN", type=Path, help=about)
    about = "relative lengths: standard deviation of the average's profile as a share of the training, 0.01 to 0.28"
    parser.add_argument("--ema", nargs="+", type=float, required=True, metavar="LENGTH", help=about)
    about = "average up to the snapshot of N images seen; by default the last"
    parser.add_argument("--images", type=int, metavar="N", help=about)
    about = f"folder of the checkpoints; by default RUN/{AVERAGES_FOLDER}"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=about)
    options = parser.parse_args(args)

    with prefixed("average"):
        write_averages(options.run, options.ema, options.images, options.output)
