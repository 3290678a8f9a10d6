"""Checks and measures everything that runs on a GPU, in one command and about seven minutes.

    python -m benchmarks.gpu --output gpu            # writes gpu.md and gpu.csv
    python -m benchmarks.gpu --data data/cifar10.npy --images 50000 --output cifar10_gpu

First it checks every path of the estimators against float64 on the CPU, with TF32 allowed; if a check fails, the exit
status is 1, and the measurements go on. A measurement that fails ends no other one, either, and the CSV file grows
with each part. Then it measures the rates of the device (the roofline), the training of iCT
and EDM at the paper's size, and each estimator on as many images as CIFAR-10, a million and ImageNet at 64x64 has, in
small and large batches: milliseconds of the device and of the host, ratio to the roofline, memory, and share of a
training step of the same number of images. Images are synthetic unless --data is given.

With FAISS it also measures FAISS's search. On a CPU it runs at small sizes, which shows only that everything works.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import Output, Rows
from benchmarks.gpu import checks, estimators, training
from benchmarks.gpu.images import synthetic_images
from benchmarks.gpu.roofline import Roofline, Sizes
from benchmarks.gpu.timing import FAILED, why
from lit_knn.common.errors import InputError
from lit_knn.common.memory import is_out_of_memory
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.data.reading import reference_from

# Seconds that a network takes to compile, about. Without them, it is not begun.
COMPILING = 120.0


class Images(NamedTuple):
    """A set to measure: the number and shape of its images, and the latents of a call."""

    N: int
    shape: tuple[int, int, int]
    batches: Sequence[int]


class Scale(NamedTuple):
    """How much is measured: all sizes of a run.

    Attributes:
        checked: images that the checks enumerate.
        sets: the sets that estimators are measured on. The checks take images of the first one's shape.
        training: size of the training.
        compiles: whether networks are compiled, too. That takes minutes.
        rates: sides of the products and bytes of the copy that measure the roofline.
        seconds: seconds for each estimator.
    """

    checked: int
    sets: tuple[Images, ...]
    training: training.Size
    compiles: bool
    rates: tuple[int, int]
    seconds: float


BATCHES = 32, 128, 1024
SETS = (
    Images(50_000, (3, 32, 32), BATCHES),
    Images(1_000_000, (3, 32, 32), BATCHES),
    # With 1024 latents, float64 products on all images of ImageNet would take minutes.
    Images(1_281_167, (3, 64, 64), BATCHES[:2]),
)
ON_GPU = Scale(2000, SETS, training.PAPER, True, (8192, 2**30), 1.0)
ON_CPU = Scale(200, (Images(300, (3, 8, 8), (4, 16)),), training.SMALL, False, (256, 2**20), 0.02)


@errors_in_one_line()
def main(argv: list[str] | None = None) -> int:
    """Run all parts, print the tables and write the files. Returns the exit status: 1 if a check failed."""
    args = _parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale, end = ON_GPU if device.type == "cuda" else ON_CPU, time.monotonic() + 60 * args.minutes

    def time_is_left(seconds: float = 0.0) -> bool:
        return time.monotonic() + seconds < end

    output = Output(args.output, "csv", "md")
    given = None if args.data is None else reference_from(args.data).images
    sets = _sets(scale.sets, given, args.images, args.batch)
    results = Results(output)
    results.add(
        "check", "checks", lambda: checks.measure(scale.checked, scale.sets[0].shape, device)
    )
    train = partial(training.measure, scale.training, device)
    results.add("training", "training", lambda: train(training.PRECISIONS, time_is_left))
    rates: list[Roofline] = []

    def on_images(N: int, shape: tuple[int, int, int], batches: Sequence[int]) -> Rows:
        if not rates:
            rates.append(Roofline(device, *scale.rates))
        images = synthetic_images(N, shape, device) if given is None else given[:N].to(device)
        d = images[0].numel()
        sizes = [Sizes(B, N, d, min(args.k, N), min(args.n, N), min(args.r, N, d)) for B in batches]
        return estimators.measure(sizes, images, rates[0], scale.seconds, time_is_left)

    for own in sets:
        results.add("estimator", f"estimators on {own.N:,} images", partial(on_images, *own))
    if scale.compiles:  # Compilers take minutes, so that they come last.
        results.add(
            "training",
            "compiled training",
            lambda: train(training.COMPILED, partial(time_is_left, COMPILING)),
        )
    results.tell(". ".join([_hardware(device), *(each.told() for each in rates)]) + ".")
    for problem in (problems := results.problems()):
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


class Results:
    """The rows of all parts. A part that fails ends no other part.

    Args:
        output: the files; the CSV file gets the rows of each part at once.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._parts: dict[str, Rows] = {"check": [], "training": [], "estimator": []}
        self._failed: list[str] = []

    def add(self, part: str, what: str, work: Callable[[], Rows]) -> None:
        """Do some work, add its rows to a part, and print its name and time to stderr."""
        start = time.monotonic()
        try:
            self._parts[part] += work()
            end = f"{time.monotonic() - start:.0f} s"
        except Exception as error:  # Libraries and drivers raise errors of many types.
            end = why(error)
            if not is_out_of_memory(error):  # A small GPU cannot hold the largest set.
                self._failed.append(f"{what}: {end}")
        print(f"{what}: {end}", file=sys.stderr, flush=True)
        self._output.write_rows(
            [{"part": part, **row} for part, rows in self._parts.items() for row in rows]
        )

    def tell(self, title: str) -> None:
        """Print and write the tables."""
        checked, trained, measured = self._parts.values()
        table = estimators.table(measured, partial(training.step_ms, trained))
        parts = checks.table(checked), training.table(trained), table
        self._output.tell("\n\n".join([title, *parts]))

    def problems(self) -> list[str]:
        """Return what failed, in one line each."""
        checked, trained, measured = self._parts.values()
        failed = [row["path"] for row in checked if not row["passed"]]
        found = (
            [f"{len(failed)} of {len(checked)} checks failed: {', '.join(failed)}"]
            if failed
            else []
        )
        for row in (*trained, *measured):
            if row["note"].startswith(FAILED):
                found.append(f"{row.get('model') or row['estimator']}: {row['note']}")
        return found + self._failed


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="prepared file, zip or folder of images, .npy or .npz"
    )
    parser.add_argument(
        "--images", type=int, nargs="+", help="numbers of images (default: three sets, or all data)"
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", help="latents per call (default: 32, 128 and 1024)"
    )
    parser.add_argument("--k", type=int, default=2048, help="neighbours of KNN")
    parser.add_argument("--n", type=int, default=256, help="images gathered per latent")
    parser.add_argument("--r", type=int, default=512, help="principal components of SubspaceKNN")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="nothing new is measured after this time"
    )
    parser.add_argument("--output", type=Path, help="stem of the files to write")
    args = parser.parse_args(argv)
    for option in ("k", "n", "r", "batch", "minutes", "images"):
        values = getattr(args, option)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and not value > 0:
                raise InputError(f"--{option} must be above 0, got {value}")
    return args


def _sets(
    sets: Sequence[Images],
    given: torch.Tensor | None,
    numbers: list[int] | None,
    batches: list[int] | None,
) -> list[Images]:
    """Return the sets with the numbers of images and latents of the command line, as far as they are given."""
    if given is not None:
        numbers = numbers or [len(given)]
        if len(given) < max(numbers):
            raise InputError(
                f"--images: the data has {len(given)} images, fewer than {max(numbers)}; give --images {len(given)}"
            )
    chosen = sets if numbers is None else [sets[0]._replace(N=N) for N in numbers]
    return [own._replace(batches=batches or own.batches) for own in chosen]


def _hardware(device: torch.device) -> str:
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return f"{name}, torch {torch.__version__}, `{' '.join(['python -m benchmarks.gpu', *sys.argv[1:]])}`"


if __name__ == "__main__":
    sys.exit(main())
