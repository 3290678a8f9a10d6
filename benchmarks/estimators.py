"""Error, time and memory of the estimators on a data set, as ratios to the plain method in the same run.

    python -m benchmarks.estimators --data PATH [--t 1 3 10 20 80] [--batch 128] [--repeats 4] [--output STEM]
    python -m benchmarks.estimators --data PATH --estimators "SubspaceKNN, r=512" Exact
    python -m benchmarks.estimators --data PATH --estimators Exact "three lines of PyTorch" --t 0.5 10 EDM --batch 64

The plain method is the paper's: KNN with k = 2048 and n = 256, its index FAISS Flat in float32. The Markdown output has
the mean squared error per dimension of each posterior mean against the exact one in float64, at each noise level
(Eq. 15, eq:mse), and its ratio to the plain method's error at the same latents, both ± one standard error over the
latents; t = EDM is a batch at levels of EDM's training. It also has the time of a call: estimators take turns, and the
first call of each is not timed. Peak memory is measured in a separate process for each estimator. `--output` also
writes STEM.csv, STEM.md, and STEM.png and .pdf, error against time.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import Entry, Output, Rows, ThreeLines, cell, in_own_process, markdown
from lit_knn.common.memory import process_bytes
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.data.reading import reference_from
from lit_knn.estimators import (
    KNN,
    STF,
    Estimator,
    Exact,
    MonteCarlo,
    OneSample,
    SubspaceKNN,
    UniformSNIS,
    Wiener,
)
from lit_knn.figures import save_figure
from lit_knn.figures.style import dress, looks
from lit_knn.index import FaissIndex, SubspaceIndex, TorchIndex
from lit_knn.metrics.estimator_error import mean_and_error, share_and_error
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.measure import TIME, fixed_source, repeated_errors
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.schedules import log_normal_sigmas

PLAIN = "KNN, FAISS Flat"
LEAST_SHOWN = 1e-13
LEVELS = ("1", "2", "3", "5", "7", "10", "20", "80")


def entries(k: int, n: int) -> dict[str, Entry]:
    """Return the estimators by name, the plain method first."""
    return {
        PLAIN: Entry(lambda: KNN(k, n), FaissIndex),
        "KNN, TorchIndex": Entry(lambda: KNN(k, n), TorchIndex),
        "KNN, TorchIndex r=256": Entry(lambda: KNN(k, n), lambda: SubspaceIndex(256)),
        "SubspaceKNN, r=256": Entry(lambda: SubspaceKNN(256, n)),
        "SubspaceKNN, r=512": Entry(lambda: SubspaceKNN(512, n)),
        "OneSample": Entry(OneSample),
        "STF": Entry(lambda: STF(n)),
        "UniformSNIS": Entry(lambda: UniformSNIS(n)),
        "MonteCarlo": Entry(lambda: MonteCarlo(n)),
        "Wiener": Entry(Wiener),
        "Exact": Entry(Exact),
        "three lines of PyTorch": Entry(ThreeLines),
    }


def chosen(args: argparse.Namespace) -> dict[str, Entry]:
    """Return the entries that `--estimators` names; the plain method, which ratios refer to, is always there."""
    every = entries(args.k, args.n)
    return {name: entry for name, entry in every.items() if name in (PLAIN, *args.estimators)}


def bound(entry: Entry, images: Tensor) -> Estimator:
    """Make the estimator of an entry, and bind it to a new set of `images` with the index of the entry."""
    return entry.estimator().bind(ReferenceSet(images, index=entry.search and entry.search()))


def level(text: str) -> str:
    """Check a noise level: a number, or EDM, which stands for those of its training."""
    return text if text == "EDM" else repr(float(text)).removesuffix(".0")


def timed_errors(
    estimators: Mapping[str, Estimator],
    images: Tensor,
    at: str,
    args: argparse.Namespace,
    exact: Estimator,
) -> dict[str, dict[str, Tensor]]:
    """Measure errors and times with `repeated_errors` at all latents. The estimators' first calls are not counted."""
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in estimators}
    for repeat in range(args.repeats + 1):
        drawn = log_normal_sigmas(
            args.batch, generator=torch.Generator().manual_seed(repeat)
        ).float()
        t = drawn.view(-1, *[1] * (images.ndim - 1)) if at == "EDM" else float(at)
        z, x = NoisyLatents(ReferenceSet(images), args.batch, repeat).batch(range(args.batch), t)
        mu = z.double() if repeat == 0 else exact.posterior_mean(z.double(), t)
        for name, estimator in estimators.items():
            found[name].append(repeated_errors(estimator, 1, z, t, mu, fixed_source(x), (repeat,)))
    return {
        name: {key: torch.cat([value[key] for value in values[1:]]) for key in ("mse", TIME)}
        for name, values in found.items()
    }


def measure(estimators: Mapping[str, Estimator], images: Tensor, args: argparse.Namespace) -> Rows:
    """Measure one row for each noise level and bound estimator. The plain method is among them.

    Columns: `mse` and `share`, its ratio to the plain method's, with standard errors (`_se`), and
    `seconds` per call.
    """
    exact = Exact().bind(ReferenceSet(images))
    rows: Rows = []
    for t in args.t:
        found = timed_errors(estimators, images, t, args, exact)
        for name, values in found.items():
            mse, mse_se = mean_and_error(values["mse"])
            share, share_se = share_and_error(values["mse"], found[PLAIN]["mse"])
            row = {
                "t": t,
                "estimator": name,
                "mse": mse,
                "mse_se": mse_se,
                "share": share,
                "share_se": share_se,
            }
            rows.append({**row, "seconds": values[TIME].mean().item() * args.batch / 1000})
        print(f"t={t} measured", file=sys.stderr, flush=True)
    return rows


def peak_memory_of_each(args: argparse.Namespace) -> dict[str, int]:
    """Measure each entry's peak resident memory in its own process, in MiB, less the peak with the images alone."""
    names = list(chosen(args))
    alone, *peaks = (in_own_process(peak_memory, name, args) for name in (None, *names))
    return {name: peak - alone for name, peak in zip(names, peaks, strict=True)}


def peak_memory(name: str | None, args: argparse.Namespace) -> int:
    """Call an entry once at B = args.batch, unless `name` is None; return this process's peak resident MiB (Linux)."""
    images = reference_from(args.data).images
    images.amax()  # Pages of a mapped file count as memory once they are read.
    z, x = NoisyLatents(ReferenceSet(images), args.batch, 0).batch(range(args.batch), 10.0)
    if name is not None:
        bound(chosen(args)[name], images).posterior_mean(z, 10.0, x_source=x)
    # ru_maxrss is of no use here: in a child process it starts at the size of the parent.
    return process_bytes("VmHWM") // 2**20


def table(rows: Rows, memory: dict[str, int]) -> str:
    """Make Markdown tables of memory, time over all levels and error at each, also as ratios to the plain method."""
    levels = list(dict.fromkeys(row["t"] for row in rows))
    of = {(row["t"], row["estimator"]): row for row in rows}
    time = {name: np.mean([of[t, name]["seconds"] for t in levels]) for name in memory}
    at = [f"t = {t}" for t in levels]
    errors = [
        ["estimator", *(f"MSE, {head}" for head in at), "time", "of plain", "memory of one call"]
    ]
    shares = [["estimator", *(f"MSE, {head}" for head in at)]]
    for name, mib in memory.items():
        own = [of[t, name] for t in levels]
        mse = (cell(row["mse"], row["mse_se"]) for row in own)
        errors.append(
            [name, *mse, f"{time[name]:.3f} s", f"{time[name] / time[PLAIN]:.2f}", f"{mib} MiB"]
        )
        shares.append([name, *(cell(row["share"], row["share_se"]) for row in own)])
    return f"{markdown(errors)}\n\nSquared error as a share of the plain method's:\n\n{markdown(shares)}"


def pareto_figure(rows: Rows) -> Figure:
    """Draw error ± standard error against time, one panel per noise level."""
    levels = list(dict.fromkeys(row["t"] for row in rows))
    styles = looks(row["estimator"] for row in rows)
    columns = min(len(levels), 4)
    lines = -(-len(levels) // columns)
    figure = Figure(figsize=(3.2 * columns, 3 * lines + 1), layout="constrained")
    all_axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes, t in zip(all_axes, levels, strict=False):
        for row in (row for row in rows if row["t"] == t):
            # A logarithmic axis cannot show 0.
            error, spread = max(row["mse"], LEAST_SHOWN), row["mse_se"]
            shown = spread > 0 and error > LEAST_SHOWN
            bar = [[min(spread, error - max(error / 10, LEAST_SHOWN))], [spread]] if shown else None
            style = styles[row["estimator"]] | {
                "markersize": 6,
                "linestyle": "none",
                "linewidth": 1,
            }
            axes.errorbar(row["seconds"], error, bar, label=row["estimator"], **style)
        dress(axes, "xy", title=f"t = {t}")
    for axes in figure.axes[-columns:]:
        axes.set_xlabel("seconds a call")
    figure.supylabel(
        f"MSE per dimension ± standard error (below {LEAST_SHOWN:g}: at {LEAST_SHOWN:g})"
    )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return figure


@errors_in_one_line()
def main() -> None:
    """Parse the command line, measure, print, and write the requested files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="prepared file, zip or folder of images, .npy or .npz",
    )
    parser.add_argument(
        "--t", type=level, nargs="+", default=list(LEVELS), help="noise levels, or EDM"
    )
    parser.add_argument("--batch", type=int, default=128, help="latents per call")
    parser.add_argument(
        "--repeats", type=int, default=4, help="calls averaged, each with new latents"
    )
    parser.add_argument("--k", type=int, default=2048, help="neighbours")
    parser.add_argument("--n", type=int, default=256, help="images gathered")
    names = list(entries(1, 1))
    parser.add_argument(
        "--estimators", nargs="+", choices=names, default=names, help="which, besides the plain one"
    )
    parser.add_argument("--output", type=Path, help="stem of the files to write")
    args = parser.parse_args()
    images = reference_from(args.data).images
    output = Output(args.output, "csv", "md", "png", "pdf")
    estimators = {name: bound(entry, images) for name, entry in chosen(args).items()}
    rows = measure(estimators, images, args)
    output.write_rows(rows)  # Rows are saved before memory is measured, because that may fail.
    text = table(rows, peak_memory_of_each(args))
    shape = (
        f"N = {len(images)}, d = {images[0].numel()}, B = {args.batch}, k = {args.k}, n = {args.n}"
    )
    output.tell(f"{shape}, {torch.get_num_threads()} threads, torch {torch.__version__}\n\n{text}")
    if args.output is not None:
        save_figure(pareto_figure(rows), args.output)


if __name__ == "__main__":
    main()
