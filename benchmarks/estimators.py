"""Error, time and memory of the estimators on a data set, as ratios to the plain method in the same run.

    python -m benchmarks.estimators --data PATH [--t 1 3 10 20 80] [--batch 128] [--repeats 4] [--output STEM]
    python -m benchmarks.estimators --data PATH --scaling 12500 25000 50000 100000 200000 [--output STEM]

The plain method is the paper's: KNN with k = 2048 and n = 256, its index FAISS Flat in float32. Printed as Markdown is
the mean squared error per dimension of each posterior mean against the exact one in float64, at each noise level
(Eq. 15, eq:mse), and its share of the plain method's at the same latents, both ± one standard error over the latents;
and the time of a call; the first of each is not timed, the others take turns. Peak memory is that of a process of its
own for each estimator. `--output` also writes STEM.csv, STEM.md and STEM.png, error against time.

With `--scaling`, the time of a call at those numbers of images: the first ones, or mirrored and shifted copies as well.
"""

import argparse
import csv
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_knn.estimators import (
    KNN,
    STF,
    Estimator,
    Exact,
    ExactFloat64,
    ExactInt8,
    MonteCarlo,
    OneSample,
    StratifiedKNN,
    SubspaceKNN,
    UniformSNIS,
    Wiener,
)
from lit_knn.images.files import read_array_file, read_image_files
from lit_knn.index import FaissIndex, Index, SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.rng import keyed_generator
from lit_knn.theory.noise import forward_noise

PLAIN = "KNN, FAISS Flat"
SCALED = (PLAIN, "KNN, TorchIndex", "SubspaceKNN, r=512", "Exact")
MARKERS = "osD^vPX*<>hp"
LEAST_SHOWN = 1e-13


class Entry(NamedTuple):
    """An estimator and the kind of index it searches; None where it searches none."""

    estimator: Callable[[], Estimator]
    search: Callable[[], Index] | None = None


def entries(k: int, n: int) -> dict[str, Entry]:
    """The estimators by name, the plain method first."""
    return {
        PLAIN: Entry(lambda: KNN(k, n), FaissIndex),
        "KNN stratified, FAISS Flat": Entry(lambda: StratifiedKNN(k, n), FaissIndex),
        "KNN, TorchIndex": Entry(lambda: KNN(k, n), TorchIndex),
        "KNN, TorchIndex r=256": Entry(lambda: KNN(k, n), lambda: SubspaceIndex(256)),
        "SubspaceKNN, r=256": Entry(lambda: SubspaceKNN(256, None, n)),
        "SubspaceKNN, r=512": Entry(lambda: SubspaceKNN(512, None, n)),
        "OneSample": Entry(OneSample),
        "STF": Entry(lambda: STF(n)),
        "UniformSNIS": Entry(lambda: UniformSNIS(n)),
        "MonteCarlo": Entry(lambda: MonteCarlo(n)),
        "Wiener": Entry(Wiener),
        "Exact": Entry(Exact),
        "Exact, int8, 3 digits": Entry(lambda: ExactInt8(3)),
        "Exact, float64": Entry(lambda: ExactFloat64()),
    }


def bound(entry: Entry, images: Tensor) -> Estimator:
    """The estimator, bound to a set of these images with its own index."""
    reference = ReferenceSet(images, index=None if entry.search is None else entry.search())
    return entry.estimator().bind(reference)


def load(path: Path) -> Tensor:
    """Images of a zip or folder, or of an .npy or .npz file."""
    read = read_array_file if path.suffix in (".npy", ".npz") else read_image_files
    return torch.as_tensor(read(path)[0])


def latents(reference: ReferenceSet, t: float, batch: int, repeat: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Images, z made from them, and a generator for the estimators."""
    generator = keyed_generator("cpu", repeat)
    x = reference.gather(torch.randint(reference.N, (batch,), generator=generator))
    return x, forward_noise(x, t, torch.randn(x.shape, generator=generator)), generator


def measure(images: Tensor, args: argparse.Namespace) -> list[dict[str, float | str]]:
    """One row for each noise level and estimator.

    `mse` and `share`, what it is of the plain method's, with standard errors (`_se`), and `seconds` of a call.
    """
    estimators = {name: bound(entry, images) for name, entry in entries(args.k, args.n).items()}
    reference, exact = ReferenceSet(images), ExactFloat64().bind(ReferenceSet(images))
    rows: list[dict[str, float | str]] = []
    for t in args.t:
        errors: dict[str, list[Tensor]] = {name: [] for name in estimators}
        seconds = dict.fromkeys(estimators, 0.0)
        for repeat in range(-1, args.repeats):
            x, z, generator = latents(reference, t, args.batch, repeat + 1)
            mu = exact.posterior_mean(z.double(), t) if repeat >= 0 else z
            for name, estimator in estimators.items():
                start = time.perf_counter()
                mu_hat = estimator.posterior_mean(z, t, x_source=x, generator=generator)
                if repeat >= 0:
                    seconds[name] += (time.perf_counter() - start) / args.repeats
                    errors[name].append((mu_hat - mu).square().flatten(1).mean(1))
        for name in estimators:
            error, plain = torch.cat(errors[name]), torch.cat(errors[PLAIN])
            (mse, mse_se), (share, share_se) = mean_and_error(error), share_and_error(error, plain)
            row: dict[str, float | str] = {"t": t, "estimator": name, "mse": mse, "mse_se": mse_se}
            rows.append({**row, "share": share, "share_se": share_se, "seconds": seconds[name]})
        print(f"t={t:g} measured", file=sys.stderr, flush=True)
    return rows


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean of (B,) values and its standard error."""
    return values.mean().item(), (values.std() / len(values) ** 0.5).item()


def share_and_error(values: Tensor, of: Tensor) -> tuple[float, float]:
    """The mean of `values` as a share of the mean of `of`, (B,) both and of the same latents, and its standard error.

    To first order the share is off by the mean of values − share·of; NaN as a share of nothing.
    """
    whole = of.mean().item()
    if whole == 0:
        return math.nan, math.nan
    share = values.mean().item() / whole
    return share, mean_and_error(values - share * of)[1] / whole


def peak_memory_of_each(args: argparse.Namespace) -> dict[str, int]:
    """Peak resident memory above that of the images alone, MiB, each in a process of its own."""
    peaks = {}
    for name in ("images alone", *entries(args.k, args.n)):
        command = [sys.executable, "-m", "benchmarks.estimators", *sys.argv[1:], "--peak-memory-of", name]
        peaks[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {name: peak - peaks["images alone"] for name, peak in peaks.items() if name != "images alone"}


def peak_memory(images: Tensor, args: argparse.Namespace) -> int:
    """Peak resident memory of this process, MiB, after one call of `args.peak_memory_of` at B = args.batch (Linux)."""
    x, z, _ = latents(ReferenceSet(images), 10.0, args.batch, 0)
    entry = entries(args.k, args.n).get(args.peak_memory_of)
    if entry is not None:
        bound(entry, images).posterior_mean(z, 10.0, x_source=x)
    # Not ru_maxrss: that of a child starts at the size of its parent.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def table(rows: list[dict[str, float | str]], memory: dict[str, int]) -> str:
    """Markdown: error at each noise level, time over all of them, as ratios to the plain method, and memory.

    Rows may lack the columns of the share or be those of a file of results, all text.
    """
    levels = list(dict.fromkeys(row["t"] for row in rows))
    of = {(row["t"], row["estimator"]): row for row in rows}
    seconds = {name: np.mean([float(of[t, name]["seconds"]) for t in levels]) for name in memory}
    head = ["estimator", *(f"MSE, t = {float(t):g}" for t in levels), "time", "of plain", "memory of one call"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, mib in memory.items():
        mse = [cell(float(of[t, name]["mse"]), float(of[t, name]["mse_se"])) for t in levels]
        ratio = seconds[name] / seconds[PLAIN]
        lines.append("| " + " | ".join([name, *mse, f"{seconds[name]:.3f} s", f"{ratio:.2f}", f"{mib} MiB"]) + " |")
    lines += [
        "",
        "Squared error as a share of the plain method's:",
        "",
        "| estimator | " + " | ".join(head[1:-3]) + " |",
    ]
    lines.append("|---" * (len(levels) + 1) + "|")
    for name in memory:
        shares = [float(of[t, name]["mse"]) / (float(of[t, PLAIN]["mse"]) or math.nan) for t in levels]
        errors = [float(of[t, name].get("share_se", math.nan)) for t in levels]
        lines.append(f"| {name} | " + " | ".join(map(cell, shares, errors)) + " |")
    return "\n".join(lines)


def cell(mean: float, standard_error: float) -> str:
    """A number with its standard error, where that is known."""
    if math.isnan(mean):
        return ""
    return f"{mean:.1e}" + ("" if math.isnan(standard_error) else f" ± {standard_error:.1e}")


def pareto_figure(rows: list[dict[str, float | str]], path: Path) -> None:
    """Error ± standard error against time, a panel for each noise level."""
    from matplotlib.figure import Figure

    levels = list(dict.fromkeys(float(row["t"]) for row in rows))
    columns = min(len(levels), 4)
    lines = -(-len(levels) // columns)
    figure = Figure(figsize=(3.2 * columns, 3 * lines + 1), layout="constrained")
    all_axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes, t in zip(all_axes, levels, strict=False):
        for number, row in enumerate(row for row in rows if float(row["t"]) == t):
            seconds, error, spread = float(row["seconds"]), float(row["mse"]), float(row["mse_se"])
            error = max(error, LEAST_SHOWN)  # a log axis has no place for 0
            marker = MARKERS[number % len(MARKERS)]
            (points,) = axes.loglog(seconds, error, marker, label=row["estimator"], markersize=7)
            if spread > 0 and error > LEAST_SHOWN:
                ends = [max(error - spread, error / 10, LEAST_SHOWN), error + spread]
                axes.loglog([seconds, seconds], ends, "-", color=points.get_color(), linewidth=1)
        axes.set_title(f"t = {t:g}")
        axes.grid(alpha=0.3)
    for axes in figure.axes[-columns:]:
        axes.set_xlabel("seconds a call")
    figure.supylabel(f"MSE per dimension ± standard error (below {LEAST_SHOWN:g}: at {LEAST_SHOWN:g})")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=150)


def resized(images: Tensor, N: int) -> Tensor:
    """The first N images; or all, with mirrored and then shifted copies, up to N."""
    copies, shift = [images], 0
    while sum(map(len, copies)) < N:
        shift += 1
        rolled = images.roll(shift // 2, dims=-1)
        copies.append(rolled.flip(-1) if shift % 2 else rolled)
    return torch.cat(copies)[:N]


def scaling(images: Tensor, args: argparse.Namespace) -> list[dict[str, float | str]]:
    """Seconds of a call, averaged over the noise levels, of some estimators at each number of images."""
    rows: list[dict[str, float | str]] = []
    for N in args.scaling:
        some = resized(images, N)
        estimators = {name: bound(entries(args.k, args.n)[name], some) for name in SCALED}
        seconds = dict.fromkeys(SCALED, 0.0)
        for t in args.t:
            for repeat in range(-1, args.repeats):
                _, z, generator = latents(ReferenceSet(some), t, args.batch, repeat + 1)
                for name, estimator in estimators.items():
                    start = time.perf_counter()
                    estimator.posterior_mean(z, t, generator=generator)
                    share = 1 / (args.repeats * len(args.t)) if repeat >= 0 else 0.0
                    seconds[name] += (time.perf_counter() - start) * share
        rows += [{"N": N, "estimator": name, "seconds": seconds[name]} for name in SCALED]
        print(f"N={N} measured", file=sys.stderr, flush=True)
    return rows


def scaling_table(rows: list[dict[str, float | str]]) -> str:
    """Markdown: seconds at each N, and the slope of a straight line through them."""
    sizes = list(dict.fromkeys(float(row["N"]) for row in rows))
    slopes = {}
    lines = ["| estimator | " + " | ".join(f"N = {N:g}" for N in sizes) + " | ms per 1,000 images | of plain |"]
    lines.append("|---" * (len(sizes) + 3) + "|")
    for name in SCALED:
        seconds = [float(row["seconds"]) for row in rows if row["estimator"] == name]
        slopes[name] = np.polyfit(sizes, seconds, 1)[0] * 1e6
        cells = [name, *(f"{s:.3f} s" for s in seconds), f"{slopes[name]:.2f}", f"{slopes[name] / slopes[PLAIN]:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_csv(rows: list[dict[str, float | str]], path: Path) -> None:
    """All rows, under the names of the first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Parse the command line, measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="zip or folder of images, .npy or .npz")
    parser.add_argument("--t", type=float, nargs="+", default=[1, 2, 3, 5, 7, 10, 20, 80], help="noise levels")
    parser.add_argument("--batch", type=int, default=128, help="latents per call")
    parser.add_argument("--repeats", type=int, default=4, help="calls averaged, each with new latents")
    parser.add_argument("--k", type=int, default=2048, help="neighbours")
    parser.add_argument("--n", type=int, default=256, help="images gathered")
    parser.add_argument("--scaling", type=int, nargs="+", help="numbers of images")
    parser.add_argument("--output", type=Path, help="stem of the files to write")
    parser.add_argument("--peak-memory-of", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    images = load(args.data)
    if args.peak_memory_of:
        print(peak_memory(images, args))
        return
    rows = scaling(images, args) if args.scaling else measure(images, args)
    if args.output is not None:  # before memory is measured, so that an error there costs nothing
        write_csv(rows, args.output.with_suffix(".csv"))
    text = scaling_table(rows) if args.scaling else table(rows, peak_memory_of_each(args))
    shape = f"N = {len(images)}, d = {images[0].numel()}, B = {args.batch}, k = {args.k}, n = {args.n}"
    text = f"{shape}, {torch.get_num_threads()} threads, torch {torch.__version__}\n\n{text}\n"
    print(text)
    if args.output is not None:
        args.output.with_suffix(".md").write_text(text)
        if not args.scaling:
            pareto_figure(rows, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
