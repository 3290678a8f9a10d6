"""Time and error of `Exact` beside three lines of PyTorch, in pairs of calls that take turns.

    python -m benchmarks.exact --data PATH [--images 2000 10000 50000] [--t 0.05 0.5 1 3 10 80] [--output STEM]

For pixels and for the same images as floats: the median, over the pairs, of the ratio of the two processor times, the
milliseconds of a call of `Exact` (median), and the largest squared error per dimension of both over 16 latents, against
sums in float64. X and ½‖x‖² of `softmax((z·Xᵀ − ½‖x‖²)/t²)·X` are made before the timing, as `bind` makes what `Exact`
keeps.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Output, Rows, markdown
from benchmarks.estimators import ThreeLines
from lit_knn.common.errors import told_in_one_line
from lit_knn.data.reading import reference_from
from lit_knn.estimators import Exact
from lit_knn.estimators.exact import float_sums
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.reference import ReferenceSet, to_model_space

CHECKED = 16


def seconds(function: Callable[[], Any]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(images: Tensor, args: argparse.Namespace) -> Rows:
    """Measure one row for each type, number of images and noise level."""
    rows: Rows = []
    for N in args.images:
        for kind, some in (("uint8", images[:N]), ("float32", to_model_space(images[:N]))):
            reference = ReferenceSet(some)
            exact, plain = (estimator.bind(reference) for estimator in (Exact(), ThreeLines()))
            for t in args.t:
                z, _ = NoisyLatents(reference, args.batch, 0).batch(range(args.batch), t)
                means = [estimator.posterior_mean(z, t)[:CHECKED].double() for estimator in (exact, plain)]
                mu, _ = float_sums(reference, z[:CHECKED], torch.full((CHECKED,), t, dtype=torch.float64))
                errors = [(mean - mu).square().flatten(1).mean(1).max().item() for mean in means]
                pairs = [
                    [seconds(partial(estimator.posterior_mean, z, t)) for estimator in (exact, plain)]
                    for _ in range(args.pairs)
                ]
                row = {"N": N, "type": kind, "t": t, "ratio": statistics.median(own / other for own, other in pairs)}
                row |= {"ms": 1e3 * statistics.median(own for own, _ in pairs)}
                rows.append({**row, "exact_error": errors[0], "three_lines_error": errors[1]})
    return rows


def table(rows: Rows) -> str:
    """Make a Markdown table."""
    lines = [["N", "type", "t", "time, of three lines", "ms", "error of `Exact`", "error of three lines"]]
    for row in rows:
        cells = (str(row["N"]), row["type"], f"{row['t']:g}", f"{row['ratio']:.2f}", f"{row['ms']:.0f}")
        lines.append([*cells, f"{row['exact_error']:.0e}", f"{row['three_lines_error']:.0e}"])
    return markdown(lines)


@told_in_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared file, zip or folder of images, .npy or .npz")
    parser.add_argument("--images", type=int, nargs="+", default=[2000, 10_000, 50_000], help="numbers of images")
    parser.add_argument("--t", type=float, nargs="+", default=[0.05, 0.5, 1, 2, 3, 5, 10, 80], help="noise levels")
    parser.add_argument("--batch", type=int, default=128, help="latents per call")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of calls")
    parser.add_argument("--output", type=Path, help="stem of the file to write")
    args = parser.parse_args(argv)
    output = Output(args.output, "md")
    rows = measure(reference_from(args.data).images, args)
    output.tell(f"B = {args.batch}, {torch.get_num_threads()} threads, torch {torch.__version__}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
