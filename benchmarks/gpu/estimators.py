"""Time, memory and roofline of every estimator on a device: rows, their table and their picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Rows, ThreeLines, markdown, number
from benchmarks.gpu import roofline
from benchmarks.gpu.roofline import Phase, Roofline, Sizes
from benchmarks.gpu.timing import milliseconds, peak_mib, release, why
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import KNN, STF, Estimator, Exact, MonteCarlo, OneSample, SubspaceKNN, UniformSNIS
from lit_knn.index import Index, SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet

# All images matter at this noise level, so that no estimator takes a short cut.
NOISE_LEVEL = 10.0
# Calls of the estimator in a training step of iCT, by solver. The paper's runs with STF and KNN take Heun's.
CALLS = {"Euler": 1, "Heun": 2}


@dataclass(frozen=True)
class Measured:
    """An estimator to measure: how to make it and its index, its least work, and whether nothing is compiled."""

    make: Callable[[Sizes], Estimator]
    work: Callable[[Sizes], Sequence[Phase]]
    index: Callable[[Sizes], Index] | None = None
    eager: bool = False


ENTRIES = {
    "OneSample": Measured(lambda s: OneSample(), roofline.one_sample),
    "STF": Measured(lambda s: STF(s.n), roofline.gathered),
    "UniformSNIS": Measured(lambda s: UniformSNIS(s.n), roofline.gathered),
    "KNN, TorchIndex": Measured(lambda s: KNN(s.k, s.n), roofline.knn, lambda s: TorchIndex()),
    "KNN, SubspaceIndex": Measured(
        lambda s: KNN(s.k, s.n), roofline.knn_in_components, lambda s: SubspaceIndex(min(s.r, 256))
    ),
    # Without the compiler, PyTorch gathers the drawn images before it reads them.
    "KNN, gathered": Measured(lambda s: KNN(s.k, s.n), roofline.knn, lambda s: TorchIndex(), eager=True),
    "SubspaceKNN": Measured(lambda s: SubspaceKNN(s.r, s.n), roofline.subspace_knn),
    "MonteCarlo": Measured(lambda s: MonteCarlo(s.n), roofline.monte_carlo),
    "Exact": Measured(lambda s: Exact(), roofline.exact),
    "three lines of PyTorch": Measured(lambda s: ThreeLines(), roofline.exact),
}


def measure(sizes: Sizes, images: Tensor, rates: Roofline, seconds: float, time_is_left: Callable[[], bool]) -> Rows:
    """Measure each estimator on images (N, C, H, W): `ms`, its ratio to the roofline, `peak_mib`; or why it was not."""
    rows: Rows = []
    for name, entry in ENTRIES.items():
        row = {"estimator": name, **sizes._asdict(), "least_ms": rates.least_ms(entry.work(sizes))}
        if not time_is_left():
            reason = "no time left"
        else:
            reason = _measure_one(entry, sizes, images, seconds, row)
            release(images.device)
        rows.append({**row, "note": reason})
    return rows


def _measure_one(entry: Measured, sizes: Sizes, images: Tensor, seconds: float, row: dict) -> str:
    """Add the measurements of one estimator to its row. Returns the reason if there are none."""
    device = images.device
    try:
        reference = ReferenceSet(images, None if entry.index is None else entry.index(sizes))
        estimator = entry.make(sizes).bind(reference)
        generator = keyed_generator(device, 0)
        x = reference.take(torch.randint(sizes.N, (sizes.B,), device=device, generator=generator))
        z = x + NOISE_LEVEL * torch.randn(x.shape, device=device, generator=generator)

        def call() -> Tensor:
            return estimator.posterior_mean(z, NOISE_LEVEL, x_source=x, generator=generator)

        with torch.compiler.set_stance("force_eager" if entry.eager else "default"):
            row["ms"] = milliseconds(call, device, seconds)
            row["of_roofline"] = row["ms"] / row["least_ms"]
            row["peak_mib"] = peak_mib(call, device)
    except Exception as error:  # Compilers, libraries and drivers raise errors of many types.
        return why(error)
    return ""


def table(rows: Rows, step_ms: float) -> str:
    """Make a Markdown table. `step_ms` is the time of iCT's step of B images without an estimator, or NaN."""
    if not rows:
        return ""
    shares = [f"share of a step of {name}" for name in CALLS]
    lines = [["estimator", "N", "ms", "roofline, ms", "ratio", *shares, "memory of a call, MiB"]]
    for row in rows:
        start = [row["estimator"], f"{row['N']:,}"]
        if "ms" in row:
            times = [calls * row["ms"] for calls in CALLS.values()]
            lines.append([
                *start, f"{row['ms']:.3g}", f"{row['least_ms']:.3g}", f"{row['of_roofline']:.2f}",
                *("" if step_ms != step_ms else f"{ms / (ms + step_ms):.1%}" for ms in times), number(row["peak_mib"]),
            ])  # fmt: skip
        else:
            lines.append([*start, row["note"], f"{row['least_ms']:.3g}", "", "", "", ""])
    sizes = Sizes(*(rows[0][name] for name in Sizes._fields))
    return f"B = {sizes.B}, d = {sizes.d}, k = {sizes.k}, n = {sizes.n}, t = {NOISE_LEVEL:g}:\n\n{markdown(lines)}"


def save_picture(rows: Rows, path: Path) -> None:
    """Draw bars of milliseconds and marks of the roofline, one panel per number of images.

    It says so and draws nothing if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"matplotlib is missing, so {path} is not drawn")
        return
    if not rows:
        return
    sizes = list(dict.fromkeys(row["N"] for row in rows))
    figure = Figure(figsize=(4.8 * len(sizes), 4), layout="constrained")
    for axes, N in zip(figure.subplots(1, len(sizes), squeeze=False).flat, sizes, strict=True):
        own = [row for row in rows if row["N"] == N][::-1]
        names = [row["estimator"] for row in own]
        axes.barh(names, [row.get("ms", float("nan")) for row in own], color="#4477aa", label="measured")
        axes.plot([row["least_ms"] for row in own], names, "|", color="#cc3311", markersize=14, label="roofline")
        axes.set_xscale("log")
        axes.set_xlabel("ms a call")
        axes.set_title(f"N = {N:,}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120)
