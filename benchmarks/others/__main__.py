"""Run other people's estimators beside ours, on one data set, in one run.

    python -m benchmarks.others --data digits --knn-score knn-score --stf stf
    python -m benchmarks.others --data cifar10.zip --t 2 5 10 20 80 --stf stf --output STEM

--knn-score, --stf and --golddiff are folders of checkouts, see docs/estimators.md. The tables have
the mean squared error per dimension of each estimator against the float64 mean over the whole set
and its ratio to our KNN's, both ± one standard error over the latents. They also have the time of
a call as a ratio to three lines of PyTorch, softmax((z·Xᵀ − ½‖x‖²)/t²)·X. All estimators get the
same latents, in turn. --output also writes STEM.csv and STEM.md.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Output, Rows, ThreeLines, cell, markdown
from benchmarks.estimators import LEVELS, PLAIN, measure
from benchmarks.others.golddiff import GoldDiff
from benchmarks.others.knn_score import KNNScore, KNNScoreSTF
from benchmarks.others.stf import STFTarget
from lit_knn.common.errors import InputError
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.common.versions import processor_name, revision
from lit_knn.data.reading import read_digits, reference_from
from lit_knn.estimators import KNN, STF, Estimator, Exact, OneSample, SubspaceKNN
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet

THREE_LINES = "three lines of PyTorch"
FOLDERS = ("knn_score", "stf", "golddiff")


def estimators_of(args: argparse.Namespace) -> dict[str, Estimator]:
    """Return our estimators and those of the named folders, not yet bound."""
    estimators: dict[str, Estimator] = {
        THREE_LINES: ThreeLines(),
        "OneSample": OneSample(),
        "STF": STF(args.n),
        PLAIN: KNN(args.k, args.n),
        "SubspaceKNN": SubspaceKNN(args.r, args.n),
        "Exact": Exact(),
    }

    if args.knn_score is not None:
        estimators["knn-score: KNNDenoiser"] = KNNScore(args.knn_score, args.k, args.n)
        estimators["knn-score: STFDenoiser"] = KNNScoreSTF(args.knn_score, args.n)
    if args.stf is not None:
        estimators["stf: stf_targets"] = STFTarget(args.stf, args.n)
    if args.golddiff is not None:
        estimators["GoldDiff: OursDenoiser"] = GoldDiff(args.golddiff)

    return estimators


def images_of(data: Path) -> Tensor:
    """Read the images, (N, C, H, W), uint8; `digits` stands for those of scikit-learn."""
    if str(data) == "digits":
        return torch.from_numpy(read_digits()[0])

    images = reference_from(data).images

    if images.dtype != torch.uint8 or images.ndim != 4:
        raise InputError(f"--data {data}: the others' code needs images of uint8")

    return images


def table(rows: Rows, head: str, write: Callable[[Mapping[str, float]], str]) -> str:
    """Make a Markdown table with a row for each estimator and a column for each noise level."""
    levels = dict.fromkeys(row["t"] for row in rows)
    lines = [[head, *(f"t = {t}" for t in levels)]]

    for name in dict.fromkeys(row["estimator"] for row in rows):
        lines.append([name, *(write(row) for row in rows if row["estimator"] == name)])

    return markdown(lines)


def text_of(rows: Rows, images: Tensor, args: argparse.Namespace) -> str:
    """Describe the run and its rows in Markdown."""
    size = f"N = {len(images)}, d = {images[0].numel()}, k = {args.k}, n = {args.n}, r = {args.r}"
    calls = f"{args.repeats} calls with {args.batch} latents at each t"
    machine = f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    versions = [f"lit_knn {revision()}"]

    for name in FOLDERS:
        folder = getattr(args, name)

        if folder is not None:
            versions.append(f"{name} {revision(folder.expanduser())}")

    errors = table(rows, "mean squared error", lambda row: cell(row["mse"], row["mse_se"]))
    shares = table(rows, "error, of our KNN's", lambda row: cell(row["share"], row["share_se"]))
    times = table(rows, "time, of the three lines'", lambda row: f"{row['time_ratio']:.3g}")

    return "\n\n".join([", ".join([size, calls, machine, *versions]), errors, shares, times])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.others",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="digits, or a path of images")
    parser.add_argument("--knn-score", type=Path, metavar="FOLDER", help="plai-group/knn-score")
    parser.add_argument("--stf", type=Path, metavar="FOLDER", help="Newbeeer/stf")
    parser.add_argument("--golddiff", type=Path, metavar="FOLDER", help="shangxinyi/GoldDiff")
    parser.add_argument("--t", type=float, nargs="+", default=LEVELS, help="noise levels")
    parser.add_argument("--batch", type=int, default=128, help="latents in a call")
    parser.add_argument("--repeats", type=int, default=4, help="calls, each with new latents")
    parser.add_argument("--k", type=int, help="neighbours; 2048, or N/4 if that is less")
    parser.add_argument("--n", type=int, help="images drawn; 256, or N/4 if that is less")
    parser.add_argument("--output", type=Path, metavar="STEM", help="stem of the files to write")

    return parser.parse_args(argv)


@errors_in_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables and write the requested files."""
    args = parse(argv)
    images = images_of(args.data)
    args.k = min(2048, len(images) // 4) if args.k is None else args.k
    args.n = min(256, len(images) // 4) if args.n is None else args.n
    args.r = min(512, images[0].numel() // 2)
    args.t = [f"{float(t):g}" for t in args.t]

    if args.batch >= args.n:
        raise InputError(f"--batch {args.batch} must be below n = {args.n}; others share n images")

    output = Output(args.output, "csv", "md")
    estimators = estimators_of(args)
    for estimator in estimators.values():
        estimator.bind(ReferenceSet(images, FaissIndex()))

    rows = measure(estimators, images, args)
    seconds = {row["t"]: row["seconds"] for row in rows if row["estimator"] == THREE_LINES}
    for row in rows:
        row["time_ratio"] = row["seconds"] / seconds[row["t"]]

    output.write_rows(rows)
    output.tell(text_of(rows, images, args))


if __name__ == "__main__":
    main()
