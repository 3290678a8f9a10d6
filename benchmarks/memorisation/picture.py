"""Picture of memorisation: copies over steps and over steps per image, distance, error, and the times over N."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.memorisation.runs import ESTIMATORS, Run
from benchmarks.memorisation.times import TIMES, growth
from lit_knn.common.tables import Row
from lit_knn.figures.style import COLOURS, MARKERS, dress, log_values

LINES = dict(zip(ESTIMATORS, ("-", "--"), strict=True))
Runs = Mapping[Run, Sequence[Row]]


def picture(runs: Runs) -> Figure:
    """Draw a line for each run: its colour tells N, and its dashes the estimator."""
    figure = Figure(figsize=(11.5, 6.2), layout="constrained")
    (copies, by_image, times), (distance, error, legend) = figure.subplots(2, 3)
    _curves(copies, runs, "copied_fraction")
    _curves(by_image, runs, "copied_fraction", per_image=True)
    _curves(distance, runs, "fd_pixels")
    _curves(error, runs, "held_error")
    dress(copies, "x", xlabel="step", title="copied fraction")
    dress(by_image, "x", xlabel="step / N", title="copied fraction (one curve if tau_mem ∝ N)")
    dress(distance, "x", xlabel="step", title="Fréchet distance on pixels, held-out digits")
    dress(error, "x", xlabel="step", title="denoising error, held-out digits")
    log_values(distance)
    log_values(error)
    _times(times, runs)
    legend.axis("off")
    legend.legend(*times.get_legend_handles_labels(), loc="center", frameon=False, fontsize="small")
    lines = dict(zip(*reversed(copies.get_legend_handles_labels()), strict=True))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _curves(axes: Axes, runs: Runs, name: str, per_image: bool = False) -> None:
    sizes = sorted({run.N for run in runs})
    for run, rows in sorted(runs.items(), key=lambda pair: pair[0].N):
        steps = [float(row["step"]) / (run.N if per_image else 1) for row in rows]
        style: dict[str, Any] = {"color": COLOURS[sizes.index(run.N) % len(COLOURS)], "linestyle": LINES[run.estimator]}
        label = f"N = {run.N}, {run.estimator}"
        axes.plot(steps, [float(row[name]) for row in rows], label=label, linewidth=1.2, **style)


def _times(axes: Axes, runs: Runs) -> None:
    """Draw the times of each run, and the fitted powers of N."""
    for number, (name, time) in enumerate(TIMES.items()):
        for estimator, fill in zip(LINES, ("full", "none"), strict=True):
            own = {run: rows for run, rows in runs.items() if run.estimator == estimator}
            points = [(run.N, value) for run, rows in own.items() if not math.isnan(value := time(rows))]
            if not points:
                continue
            colour, slope = COLOURS[number], growth(own, time)
            label = f"{name}, {estimator}" + ("" if slope is None else f": N^{slope.exponent:.2f}")
            axes.plot(*zip(*points, strict=True), MARKERS[number], c=colour, fillstyle=fill, markersize=4, label=label)
            if slope is not None:
                ends = np.array([min(points)[0], max(points)[0]])
                axes.plot(
                    ends, slope.factor * ends**slope.exponent, color=colour, linestyle=LINES[estimator], linewidth=1
                )
    dress(axes, "xy", xlabel="N", ylabel="step", title="times over N")
