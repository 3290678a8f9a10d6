"""Checks and measures everything that runs on a GPU, in one command and under nine minutes.

    python -m benchmarks.gpu --output gpu            # writes gpu.md, gpu.csv and gpu.png
    python -m benchmarks.gpu --data data/cifar10.npy --images 50000 --output cifar10_gpu

First it checks every path of the estimators against float64 on the CPU, with TF32 allowed; if a check fails, the exit
status is 1, and the measurements go on. A measurement that fails ends no other one, either, and the CSV file grows
with each part. Then it measures the rates of the device (the roofline), the training of iCT
and EDM at the paper's size, and each estimator: milliseconds, ratio to the roofline, memory, and share of a training
step of the same number of images. Images are synthetic unless --data is given.

It needs torch, Lightning, torchmetrics and jsonargparse alone: no FAISS and no torch-fidelity. matplotlib draws the
picture. On a CPU it runs at small sizes, which shows only that everything works.
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
from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.data.reading import reference_from

# Seconds that a network takes to compile, about. Without them, it is not begun.
COMPILING = 120.0


class Scale(NamedTuple):
    """How much is measured: all sizes of a run.

    Attributes:
        checked: images that the checks enumerate.
        shape: shape of synthetic images.
        images: numbers of images that estimators are measured on.
        batch: latents per call.
        training: size of the training.
        compiles: whether networks are compiled, too. That takes minutes.
        rates: sides of the products and bytes of the copy that measure the roofline.
        seconds: seconds for each estimator.
    """

    checked: int
    shape: tuple[int, int, int]
    images: tuple[int, ...]
    batch: int
    training: training.Size
    compiles: bool
    rates: tuple[int, int]
    seconds: float


ON_GPU = Scale(2000, (3, 32, 32), (50_000, 1_000_000), 1024, training.PAPER, True, (8192, 2**30), 3.0)
ON_CPU = Scale(200, (3, 8, 8), (300,), 16, training.SMALL, False, (256, 2**20), 0.02)


@told_in_one_line()
def main(argv: list[str] | None = None) -> int:
    """Run all parts, print the tables and write the files. Returns the exit status: 1 if a check failed."""
    args = _parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale, end = ON_GPU if device.type == "cuda" else ON_CPU, time.monotonic() + 60 * args.minutes

    def time_is_left(seconds: float = 0.0) -> bool:
        return time.monotonic() + seconds < end

    output = Output(args.output, "csv", "md", "png")
    given = None if args.data is None else reference_from(args.data).images
    batch, numbers = args.batch or scale.batch, args.images or scale.images
    _check_numbers(given, numbers)
    results = Results(output)
    results.add("check", "checks", lambda: checks.measure(scale.checked, scale.shape, device))
    train = partial(training.measure, scale.training, device)
    results.add("training", "training", lambda: train(training.PRECISIONS, time_is_left))
    rates: list[Roofline] = []

    def on_images(N: int) -> Rows:
        if not rates:
            rates.append(Roofline(device, *scale.rates))
        images = synthetic_images(N, scale.shape, device) if given is None else given[:N].to(device)
        d = images[0].numel()
        sizes = Sizes(batch, N, d, min(args.k, N), min(args.n, N), min(args.r, N, d))
        return estimators.measure(sizes, images, rates[0], scale.seconds, time_is_left)

    for N in numbers:
        results.add("estimator", f"estimators on {N:,} images", partial(on_images, N))
    if scale.compiles:  # Compilers take minutes, so that they come last.
        results.add("training", "compiled training", lambda: train(training.COMPILED, partial(time_is_left, COMPILING)))
    results.tell(". ".join([_hardware(device), *(each.told() for each in rates)]) + ".", batch)
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
        except Exception as error:  # Libraries and drivers raise errors of many types.
            self._failed.append(f"{what}: {why(error)}")
        print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        self._output.write_rows([{"part": part, **row} for part, rows in self._parts.items() for row in rows])

    def tell(self, title: str, batch: int) -> None:
        """Print and write the tables, and draw the picture."""
        checked, trained, measured = self._parts.values()
        step_ms = training.step_ms(trained, batch)
        parts = checks.table(checked), training.table(trained), estimators.table(measured, step_ms)
        self._output.tell("\n\n".join([title, *parts]))
        if (path := self._output.path("png")) is not None:
            estimators.save_picture(measured, path)

    def problems(self) -> list[str]:
        """Return what failed, in one line each."""
        checked, trained, measured = self._parts.values()
        failed = [row["path"] for row in checked if not row["passed"]]
        found = [f"{len(failed)} of {len(checked)} checks failed: {', '.join(failed)}"] if failed else []
        for row in (*trained, *measured):
            if row["note"].startswith(FAILED):
                found.append(f"{row.get('model') or row['estimator']}: {row['note']}")
        return found + self._failed


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="prepared file, zip or folder of images, .npy or .npz")
    parser.add_argument("--images", type=int, nargs="+", help="numbers of images (default: 50,000 and 1,000,000)")
    parser.add_argument("--batch", type=int, help="latents per call (default: 1024)")
    parser.add_argument("--k", type=int, default=2048, help="neighbours of KNN")
    parser.add_argument("--n", type=int, default=256, help="images gathered per latent")
    parser.add_argument("--r", type=int, default=512, help="principal components of SubspaceKNN")
    parser.add_argument("--minutes", type=float, default=8.5, help="nothing new is measured after this time")
    parser.add_argument("--output", type=Path, help="stem of the files to write")
    args = parser.parse_args(argv)
    for option in ("k", "n", "r", "batch", "minutes", *(("images",) if args.images else ())):
        values = getattr(args, option)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and not value > 0:
                raise InputError(f"--{option} must be above 0, got {value}")
    return args


def _check_numbers(images: torch.Tensor | None, numbers: Sequence[int]) -> None:
    if images is not None and len(images) < max(numbers):
        raise InputError(
            f"--images: the data has {len(images)} images, fewer than {max(numbers)}; give --images {len(images)}"
        )


def _hardware(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, `{' '.join(['python -m benchmarks.gpu', *sys.argv[1:]])}`"


if __name__ == "__main__":
    sys.exit(main())
