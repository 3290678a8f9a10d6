"""`lit-knn average RUN --ema LENGTH...` makes averages of the weights of a run after its training.

It sums the snapshots of `PowerAverages` with the profile nearest to the wanted one (arXiv 2312.02696, Sec. 3.2).
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lit_knn.common.checkpoint_file import read_checkpoint_file
from lit_knn.common.errors import InputError, prefixed
from lit_knn.modules.averaging import checked_lengths, exponent
from lit_knn.runs.checkpoints import AVERAGE_KEY, WholeCheckpointIO
from lit_knn.runs.folder import RunFolder

Snapshot = dict[str, Any]
AVERAGES_FOLDER = "averages"
# If the profile error exceeds these limits, the sum is written with a warning, or refused.
WARNED, REFUSED = 0.05, 0.3
# Singular values below this share of the largest are rounding errors of the inner products.
CUTOFF = 1e-13


class Profile(NamedTuple):
    """The profile of an average, p(t) = (γ+1)·t^γ / T^(γ+1) for 0 < t <= T, Eq. 121 of arXiv 2312.02696."""

    gamma: float  # γ, at least 0
    end: float  # T, the number of images seen at which the average was taken


class Fit(NamedTuple):
    """The weights that combine averages into another one."""

    weights: np.ndarray  # (n,), float64, of sum 1
    # L2 norm of the profile's error as a share of that of the profile; below 1e-7 it is rounding
    residual: float


def inner_product(a: Profile, b: Profile) -> float:
    """Return ∫ p_a(t) p_b(t) dt, Eq. 151 of arXiv 2312.02696."""
    early, late = (a, b) if a.end <= b.end else (b, a)
    factor = (a.gamma + 1) * (b.gamma + 1) / (a.gamma + b.gamma + 1)
    return factor * (early.end / late.end) ** late.gamma / late.end


def fit(stored: Sequence[Profile], wanted: Profile) -> Fit:
    """Return the weights, of sum 1, of the stored averages whose sum of profiles is nearest to the wanted one in L2.

    The authors of arXiv 2312.02696 solve without this condition, and their program divides the solution by its sum.
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


def average(snapshots: Sequence[Snapshot], weights: np.ndarray) -> dict[str, Tensor]:
    """Sum snapshots of one architecture in float64. Integers come from the last one; 16-bit tensors become float32."""
    averages = list(itertools.chain.from_iterable(snapshot["averages"] for snapshot in snapshots))
    summed = {}
    for name, last in averages[-1].items():
        if not last.is_floating_point():
            summed[name] = last
            continue
        total = torch.zeros(last.shape, dtype=torch.float64)
        for weight, each in zip(weights, averages, strict=True):
            total.add_(each[name].double(), alpha=float(weight))
        summed[name] = total.to(torch.float32 if last.element_size() < 4 else last.dtype)
    return summed


def fit_length(snapshots: Sequence[Snapshot], length: float) -> Fit:
    """Fit the average of a relative length at the last of the snapshots; refuse it if the nearest sum is too far."""
    stored = [Profile(exponent(each), s["images_seen"]) for s in snapshots for each in s["lengths"]]
    fitted = fit(stored, Profile(exponent(length), snapshots[-1]["images_seen"]))
    problem = f"--ema {length:g}: the nearest sum of {len(snapshots)} snapshot(s) has an error of {fitted.residual:.0%}"
    advice = f"stored are the lengths {snapshots[-1]['lengths']}; a smaller every_n_images reaches further"
    if fitted.residual > REFUSED:
        raise InputError(f"{problem}, above {REFUSED:.0%}; {advice}")
    if fitted.residual > WARNED:
        rank_zero_warn(f"{problem}; {advice}")
    return fitted


def write_averages(
    run: Path, lengths: Sequence[float], images: int | None = None, folder: Path | None = None
) -> None:
    """Make averages of a run, and print what was written. The options are those of `main`."""
    with prefixed("--ema"):
        lengths = checked_lengths(lengths)
    paths = RunFolder(run).kept_snapshots()
    if images is not None and images not in paths:
        nearest = ", ".join(map(str, sorted(paths, key=lambda seen: abs(seen - images))[:3]))
        raise InputError(f"--images {images}: there is no such snapshot; the nearest are {nearest}")
    folder = run / AVERAGES_FOLDER if folder is None else folder
    # A length has at least three digits in the name: ema=0.050.ckpt.
    names = [
        f"{length:.3f}" if float(f"{length:.3f}") == length else repr(length) for length in lengths
    ]
    files = [folder / f"ema={name}.ckpt" for name in names]
    chosen = [path for seen, path in paths.items() if images is None or seen <= images]
    # Tensors are loaded when they are used.
    snapshots = [read_checkpoint_file(path, mmap=True) for path in chosen]
    fits, last = [fit_length(snapshots, length) for length in lengths], snapshots[-1]
    print(
        f"{len(snapshots)} snapshots, up to {last['images_seen']:,} images seen, of the lengths {last['lengths']}"
    )
    header = {name: value for name, value in last.items() if name not in ("lengths", "averages")}
    made = {
        path: {"length": length, "residual": fitted.residual, "snapshots": len(snapshots)}
        for length, fitted, path in zip(lengths, fits, files, strict=True)
    }
    # A command that was interrupted goes on with the files that are missing.
    there = [path for path in files if path.exists()]
    for path in there:
        found = read_checkpoint_file(path, mmap=True)
        if found.get(AVERAGE_KEY) != made[path] or found.get("images_seen") != last["images_seen"]:
            raise InputError(
                f"{path} is another average; nothing is overwritten, give another --output"
            )
    for path, fitted in zip(files, fits, strict=True):
        if path not in there:
            # `validate` and `predict` accept this checkpoint; a training cannot resume from it.
            checkpoint = {
                **header,
                "state_dict": average(snapshots, fitted.weights),
                AVERAGE_KEY: made[path],
            }
            WholeCheckpointIO().save_checkpoint(checkpoint, path)
        print(
            f"{path}: error of the profile {fitted.residual:.2g}{', is there already' if path in there else ''}"
        )
    print(f"Written: {len(files) - len(there)} average(s), into {folder}")


def main(args: Sequence[str] | None = None) -> None:
    """Make the averages of a command line."""
    about = "Make averages of the weights of a run after its training, of any length, from the snapshots of "
    about += "lit_knn.callbacks.PowerAverages. `validate` and `predict --ckpt_path` take them. See docs/training.md."
    parser = argparse.ArgumentParser(prog="lit-knn average", description=about)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="folder of a run; if it was resumed, the last folder")
    lengths = "relative lengths: standard deviation of the average's profile as a share of the training, 0.01 to 0.28"
    add("--ema", nargs="+", type=float, required=True, metavar="LENGTH", help=lengths)
    add(
        "--images",
        type=int,
        metavar="N",
        help="average up to the snapshot of N images seen; by default the last",
    )
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"folder of the checkpoints; by default RUN/{AVERAGES_FOLDER}",
    )
    options = parser.parse_args(args)
    with prefixed("average"):
        write_averages(options.run, options.ema, options.images, options.output)
