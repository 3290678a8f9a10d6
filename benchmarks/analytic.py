"""Times the analytic estimators beside the public code of their papers, and measures the memory of one mean.

    python -m benchmarks.analytic CHECKOUTS --data cifar10.npy [--images 1000] [--batch 8] [--entries PCALocality ...]
    python -m benchmarks.analytic --memory --data cifar10.npy --batch 32 --entries PCALocality

CHECKOUTS is the folder of the checkouts, with their names (see docs/referee.md). Both run in one process on
one thread, one after the other in turns, on the same latents. The fastest turn of each counts, in seconds of processor
time. What is computed from the images alone, such as a covariance, is done before. The difference is the largest of all
values of both means; where the public code estimates something else, the note says what. `--memory` measures our
estimators alone, each in a process of its own.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import Output, load, markdown
from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.common.memory import process_bytes
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import Estimator, PatchPosterior, PCALocality, Smoothed
from lit_knn.referee.adapters import PSPCSquare, StudioPCALocality
from lit_knn.referee.child_process import in_own_process
from lit_knn.reference import ReferenceSet

THRESHOLD = 0.05


class Pair(NamedTuple):
    """One of our estimators and the public code.

    Attributes:
        ours: makes the estimator.
        theirs: makes the adapter from the folder of the checkouts, for N images; None if there is no public code.
        note: why the two differ, or "".
    """

    ours: Callable[[], Estimator]
    theirs: Callable[[Path, int], Estimator] | None = None
    note: str = ""


def _patches(p: int) -> Pair:
    return Pair(lambda: PatchPosterior(p), lambda folder, N: PSPCSquare(str(folder / "pspc"), [p, p]))


def _locality(folder: Path, N: int) -> Estimator:
    # One batch of the loader, because the softmax of each batch is averaged.
    return StudioPCALocality(str(folder / "analytic-diffusion-studio"), N, THRESHOLD, rows=1)


PAIRS = {
    **{f"PatchPosterior({p})": _patches(p) for p in (3, 7, 15)},
    "PCALocality": Pair(lambda: PCALocality(THRESHOLD), _locality, "another rule of the masks"),
    "Smoothed(PatchPosterior(7), n=4)": Pair(lambda: Smoothed(PatchPosterior(7), 0.3, 4)),
}


def latents(reference: ReferenceSet, t: float, count: int) -> Tensor:
    """Draw latents from the forward process."""
    generator = keyed_generator("cpu", 0)
    x = reference.take(torch.randint(reference.N, (count,), generator=generator))
    return x + t * torch.randn(x.shape, generator=generator)


def timed(estimator: Estimator, z: Tensor, t: float) -> tuple[float, Tensor]:
    """Return the seconds of processor time of one mean, and the mean."""
    start = time.process_time()
    mean = estimator.posterior_mean(z, t, generator=keyed_generator("cpu", 1))
    return time.process_time() - start, mean


def compare(name: str, folder: Path, reference: ReferenceSet, args: argparse.Namespace) -> dict[str, Any]:
    """Time a pair in turns. Returns a row of the table."""
    pair, z = PAIRS[name], latents(reference, args.t, args.batch)
    if pair.theirs is None:
        raise InputError(f"--entries: {name} has no public code to compare with")
    both = [pair.ours().bind(reference), pair.theirs(folder, reference.N).bind(reference)]
    seconds: list[list[float]] = [[], []]
    means = [z, z]
    for _ in range(args.turns):
        for i, estimator in enumerate(both):
            took, means[i] = timed(estimator, z, args.t)
            seconds[i].append(took)
    ours, theirs = map(min, seconds)
    difference = (means[0] - means[1]).abs().max().item()
    return {
        "estimator": name,
        "N": reference.N,
        "B": args.batch,
        "t": args.t,
        "ours_s": ours,
        "theirs_s": theirs,
        "ratio": theirs / ours,
        "difference": difference,
        "note": pair.note,
    }


def measure_memory(name: str, data: Path, images: int | None, batch: int, t: float) -> dict[str, float]:
    """Compute one mean in this process. Returns seconds, and MiB before `bind`, after it and at the peak."""
    torch.set_num_threads(1)
    reference = ReferenceSet(load(data)[:images].clone())
    before = process_bytes()
    start = time.process_time()
    estimator = PAIRS[name].ours().bind(reference)
    bind, bound = time.process_time() - start, process_bytes("VmHWM")
    seconds, _ = timed(estimator, latents(reference, t, batch), t)
    peak = process_bytes("VmHWM")
    sizes = {"before_mib": before, "bind_mib": bound, "peak_mib": peak}
    return {"N": reference.N, "bind_s": bind, "mean_s": seconds} | {k: v / 2**20 for k, v in sizes.items()}


def memory_row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the memory of one estimator in a process of its own. Returns a row of the table."""
    row, _ = in_own_process(measure_memory, name, args.data, args.images, args.batch, args.t)
    return {"estimator": name, "B": args.batch, "t": args.t, **row}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="?")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, help="use so many of the images; default: all")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--t", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--entries", nargs="+", help="rows of the table; default: all that have public code")
    parser.add_argument("--memory", action="store_true", help="measure the memory of our estimators alone")
    parser.add_argument("--output", type=Path, help="write STEM.csv and STEM.md")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = args.entries or [name for name, pair in PAIRS.items() if args.memory or pair.theirs]
    for name in names:
        if name not in PAIRS:
            raise InputError(f"--entries: {name} is none of {', '.join(PAIRS)}")
    if args.checkouts is None and not args.memory:
        raise InputError("CHECKOUTS is missing: the folder of the public code")
    output = Output(args.output, "csv", "md")
    reference = None if args.memory else ReferenceSet(load(args.data)[: args.images])
    rows = []
    for name in names:
        rows.append(memory_row(name, args) if reference is None else compare(name, args.checkouts, reference, args))
        print(rows[-1], flush=True)
        output.write_rows(rows)
    output.tell(markdown([[*rows[0]], *([_told(value) for value in row.values()] for row in rows)]))


def _told(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    with told_in_one_line():
        main()
