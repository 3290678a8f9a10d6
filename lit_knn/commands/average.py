"""`lit-knn average RUN --ema LENGTH...` makes averages of the weights of a run after its training.

`lit_knn.callbacks.PowerAverages` stored snapshots of two averages during the training. The weighted sum of them whose
profile is nearest to the wanted one is written as a checkpoint (arXiv 2312.02696, Sec. 3.2).
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lit_knn.common.checkpoint_file import read_checkpoint_file
from lit_knn.common.errors import InputError, prefixed
from lit_knn.modules.power_averages import checked_lengths, exponent
from lit_knn.runs.checkpoints import AVERAGE_KEY, WholeCheckpointIO
from lit_knn.runs.folder import RunFolder

Snapshot = dict[str, Any]
AVERAGES_FOLDER = "averages"
# Above these shares of the profile's norm, the sum is told to be, or is not taken for, the wanted average.
WARNED, REFUSED = 0.05, 0.3
PARTS_OF_A_SNAPSHOT = {"lengths", "averages", "images_seen", "global_step", "pytorch-lightning_version"}
# Singular values below this share of the largest are rounding errors of the inner products.
CUTOFF = 1e-13


class Profile(NamedTuple):
    """The profile of an average, p(t) = (γ+1)·t^γ / T^(γ+1) for 0 < t <= T, Eq. 121 of arXiv 2312.02696.

    Attributes:
        gamma: γ, at least 0.
        end: T, the number of images seen at which the average was taken.
    """

    gamma: float
    end: float


class Fit(NamedTuple):
    """The weights that combine averages into another one.

    Attributes:
        weights: (n,), float64; their sum is 1.
        residual: L2 norm of the profile's error, as a share of the L2 norm of the profile. Values below 1e-7 are
            rounding errors.
    """

    weights: np.ndarray
    residual: float


def inner_product(a: Profile, b: Profile) -> float:
    """Return ∫ p_a(t) p_b(t) dt, Eq. 151 of arXiv 2312.02696."""
    early, late = (a, b) if a.end <= b.end else (b, a)
    factor = (a.gamma + 1) * (b.gamma + 1) / (a.gamma + b.gamma + 1)
    return factor * (early.end / late.end) ** late.gamma / late.end


def fit(stored: Sequence[Profile], wanted: Profile) -> Fit:
    """Return the weights of the stored averages whose sum of profiles is nearest to the wanted one in L2.

    The weights sum to 1, so constant weights of a network stay what they are. This is a condition of the fit. The
    authors of arXiv 2312.02696 solve without it, and their program then divides the solution by its sum.
    """
    n = len(stored)
    products = np.array([[inner_product(a, b) for b in stored] for a in stored])
    with_wanted = np.array([inner_product(a, wanted) for a in stored])
    norm = inner_product(wanted, wanted)
    # Differences from the last profile have no mass. Any combination of them keeps the sum at 1.
    differences = np.eye(n)[:-1] - np.eye(n)[-1]
    gram = differences @ products @ differences.T
    sides = differences @ (with_wanted - products[-1])
    # The diagonal of the scaled matrix is 1, so the cutoff treats long and short averages alike.
    scale = np.sqrt(np.clip(np.diag(gram), np.finfo(np.float64).tiny, None))
    scaled = np.linalg.lstsq(gram / np.outer(scale, scale), sides / scale, rcond=CUTOFF)[0]
    weights = np.eye(n)[-1] + differences.T @ (scaled / scale)
    squared = norm - 2 * weights @ with_wanted + weights @ products @ weights
    return Fit(weights, float(np.sqrt(max(squared, 0.0) / norm)))


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot. Its tensors are loaded when they are used.

    Raises:
        InputError: the file is damaged, or is no snapshot of averages.
    """
    snapshot = read_checkpoint_file(path, mmap=True)
    if not snapshot.keys() >= PARTS_OF_A_SNAPSHOT:
        raise InputError(f"{path} is no snapshot of averages, which lit_knn.callbacks.PowerAverages writes")
    lengths, averages = snapshot["lengths"], snapshot["averages"]
    whole = isinstance(lengths, list) and isinstance(averages, list) and len(lengths) == len(averages)
    if not whole or not all(_is_average(each) for each in averages):
        raise InputError(f"{path} is no snapshot of averages: it has not one average for each length")
    if any(_shapes(each) != _shapes(averages[0]) for each in averages):
        raise InputError(f"{path} is no snapshot of averages: they are of different architectures")
    if not all(type(length) in (int, float) for length in lengths):
        raise InputError(f"{path} is no snapshot of averages: its lengths are not numbers")
    with prefixed(f"{path}"):
        checked_lengths(lengths)
    return snapshot


def read_snapshots(paths: Mapping[int, Path]) -> list[Snapshot]:
    """Read snapshots of one training, given by the images seen.

    Raises:
        InputError: one is damaged, has another name than it was written to, or is of another architecture.
    """
    snapshots: list[Snapshot] = []
    for seen, path in paths.items():
        snapshot = read_snapshot(path)
        if snapshot["images_seen"] != seen:
            raise InputError(f"{path} is of {snapshot['images_seen']} images: it has been renamed")
        if snapshots and (other := _difference(snapshots[0], snapshot)):
            raise InputError(f"{path} is of another architecture than {next(iter(paths.values()))}: {other}")
        snapshots.append(snapshot)
    return snapshots


def _is_average(weights: object) -> bool:
    return isinstance(weights, dict) and all(isinstance(value, Tensor) for value in weights.values())


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


def _difference(first: Snapshot, other: Snapshot) -> str | None:
    shapes = [_shapes(snapshot["averages"][0]) for snapshot in (first, other)]
    names = (name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
    return next(
        (f"{name} is {shapes[1].get(name, 'absent')}, not {shapes[0].get(name, 'absent')}" for name in names), None
    )


def profiles(snapshots: Sequence[Snapshot]) -> list[Profile]:
    """List the profiles of all averages in the snapshots, in the order in which `average` takes them."""
    return [Profile(exponent(length), s["images_seen"]) for s in snapshots for length in s["lengths"]]


def average(snapshots: Sequence[Snapshot], weights: np.ndarray) -> dict[str, Tensor]:
    """Sum the averages in the snapshots, in float64. Integers, such as counts in a buffer, are those of the last one.

    Args:
        snapshots: snapshots of one architecture.
        weights: the weight of each of their averages, (n,).

    Returns:
        Tensors by name, of the stored type; those stored in 16 bits are float32.

    Raises:
        InputError: a sum is not finite.
    """
    averages = list(itertools.chain.from_iterable(snapshot["averages"] for snapshot in snapshots))
    summed = {}
    for name, last in averages[-1].items():
        if not last.is_floating_point():
            summed[name] = last
            continue
        total = torch.zeros(last.shape, dtype=torch.float64)
        for weight, each in zip(weights, averages, strict=True):
            total.add_(each[name].double(), alpha=float(weight))
        if not total.isfinite().all():
            raise InputError(f"average: the sum of {name} is not finite, because a snapshot is not")
        summed[name] = total.to(torch.float32 if last.element_size() < 4 else last.dtype)
    return summed


def as_checkpoint(snapshots: Sequence[Snapshot], length: float, fitted: Fit) -> dict[str, Any]:
    """Make a checkpoint that `validate` and `predict` take; no training can go on from it."""
    checkpoint = {name: value for name, value in snapshots[-1].items() if name not in ("lengths", "averages")}
    checkpoint["state_dict"] = average(snapshots, fitted.weights)
    checkpoint[AVERAGE_KEY] = {"length": length, "residual": fitted.residual, "snapshots": len(snapshots)}
    return checkpoint


def fit_length(snapshots: Sequence[Snapshot], length: float) -> Fit:
    """Fit the average of a relative length at the last of the snapshots.

    Raises:
        InputError: the snapshots do not span it.
    """
    fitted = fit(profiles(snapshots), Profile(exponent(length), snapshots[-1]["images_seen"]))
    told = f"--ema {length:g}: the nearest sum of {len(snapshots)} snapshot(s) has an error of {fitted.residual:.0%}"
    advice = (
        f"stored are the lengths {snapshots[-1]['lengths']}; more snapshots, by a smaller every_n_images, reach further"
    )
    if fitted.residual > REFUSED:
        raise InputError(f"average: {told}, above {REFUSED:.0%}; {advice}")
    if fitted.residual > WARNED:
        rank_zero_warn(f"{told}; {advice}")
    return fitted


def name_of(length: float) -> str:
    """Name the file of an average: ema=0.050.ckpt, with more digits if the length has more."""
    return f"ema={length:.3f}.ckpt" if float(f"{length:.3f}") == length else f"ema={length!r}.ckpt"


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="lit-knn average",
        description="Make averages of the weights of a run after its training, of any length, from the snapshots that "
        "lit_knn.callbacks.PowerAverages stored. `validate` and `predict --ckpt_path` take them. See docs/training.md.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="folder of a training run; of a resumed one the last, earlier ones are found"
    )
    parser.add_argument(
        "--ema",
        nargs="+",
        type=float,
        required=True,
        metavar="LENGTH",
        help="relative lengths: standard deviation of the average's profile as a share of the training, 0.01 to 0.28",
    )
    parser.add_argument(
        "--images", type=int, metavar="N", help="average up to the snapshot of N images seen; by default up to the last"
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help=f"folder of the checkpoints; by default RUN/{AVERAGES_FOLDER}"
    )
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Make the averages of a command line, and print what was written.

    Raises:
        InputError: a length is out of its range or not reached by the snapshots, there are no snapshots, one is damaged
            or of another architecture, or a file to write is there already.
    """
    options = parse(args)
    with prefixed("average: --ema"):
        lengths = checked_lengths(options.ema)
    with prefixed("average"):
        paths = up_to(RunFolder(Path(options.run)).kept_snapshots(), options.images)
        folder = Path(options.run) / AVERAGES_FOLDER if options.output is None else Path(options.output)
        files = [folder / name_of(length) for length in lengths]
        taken = next((path for path in files if path.exists()), None)
        if taken is not None:
            raise InputError(f"{taken} is there already; nothing is overwritten, give another --output")
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--output {folder} is a file, not a folder")
        snapshots = read_snapshots(paths)
    fits = [fit_length(snapshots, length) for length in lengths]
    last = snapshots[-1]
    print(f"{len(snapshots)} snapshots, up to {last['images_seen']:,} images seen, of the lengths {last['lengths']}")
    for length, fitted, path in zip(lengths, fits, files, strict=True):
        WholeCheckpointIO().save_checkpoint(as_checkpoint(snapshots, length, fitted), path)
        print(f"{path}: error of the profile {fitted.residual:.2g}")
    print(f"Written: {len(files)} average(s), into {folder}")


def up_to(paths: Mapping[int, Path], images: int | None) -> dict[int, Path]:
    """Leave out the snapshots after the one of so many images; None keeps all.

    Raises:
        InputError: there is no snapshot of so many images.
    """
    if images is not None and images not in paths:
        there = ", ".join(map(str, sorted(paths, key=lambda seen: abs(seen - images))[:3]))
        raise InputError(f"--images {images}: there is no such snapshot; the nearest are {there}")
    return {seen: path for seen, path in paths.items() if images is None or seen <= images}
