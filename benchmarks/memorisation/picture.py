"""Picture of memorisation: copies over steps and over steps per image, distance, and both times over N."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.memorisation.runs import ESTIMATORS, Run
from benchmarks.memorisation.times import COPIED_LEVELS, generation_time, growth, memorisation_time
from lit_knn.figures.style import COLOURS, dress
from lit_knn.results import Row

LINES = dict(zip(ESTIMATORS, ("-", "--"), strict=True))
Runs = Mapping[Run, Sequence[Row]]


def picture(runs: Runs) -> Figure:
    """Draw a line for each run: its colour tells N, and its dashes the estimator."""
    figure = Figure(figsize=(9, 6.6), layout="constrained")
    (over_steps, over_epochs), (distance, times) = figure.subplots(2, 2)
    _curves(over_steps, runs, "copied_fraction", lambda run: 1.0)
    _curves(over_epochs, runs, "copied_fraction", lambda run: float(run.N))
    _curves(distance, runs, "fd_pixels", lambda run: 1.0)
    dress(over_steps, "x", xlabel="step", ylabel="copied fraction", title="Copies")
    dress(over_epochs, "x", xlabel="step / N", ylabel="copied fraction", title="Copies, if tau_mem ∝ N one curve")
    dress(distance, "xy", xlabel="step", ylabel="Fréchet distance on pixels", title="Distance to held-out digits")
    _times(times, runs)
    lines = dict(zip(*reversed(over_steps.get_legend_handles_labels()), strict=True))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
    return figure


def _curves(axes: Axes, runs: Runs, name: str, unit: Callable[[Run], float]) -> None:
    sizes = sorted({run.N for run in runs})
    for run, rows in runs.items():
        steps = [float(row["step"]) / unit(run) for row in rows]
        style = {"color": COLOURS[sizes.index(run.N) % len(COLOURS)], "linestyle": LINES[run.estimator]}
        label = f"N = {run.N}" if run.estimator == next(iter(LINES)) else f"{run.N}, {run.estimator}"
        axes.plot(steps, [float(row[name]) for row in rows], label=label, linewidth=1.2, **style)


def _times(axes: Axes, runs: Runs) -> None:
    """Draw both times of each run, and the fitted powers of N."""
    kinds: dict[str, Callable[[Sequence[Row]], float]] = {"tau_gen": generation_time}
    kinds |= {
        f"tau_mem, {level:.0%}": lambda rows, level=level: memorisation_time(rows, level) for level in COPIED_LEVELS
    }
    for number, (name, time) in enumerate(kinds.items()):
        for estimator, filled in zip(LINES, ("full", "none"), strict=True):
            own = {run: rows for run, rows in runs.items() if run.estimator == estimator}
            points = [(run.N, value) for run, rows in own.items() if not math.isnan(value := time(rows))]
            if not points:
                continue
            slope = growth(own, time)
            label = f"{name}, {estimator}" + ("" if slope is None else f": N^{slope.exponent:.2f}")
            axes.plot(
                *zip(*points, strict=True),
                "osD"[number],
                color=COLOURS[number],
                fillstyle=filled,
                markersize=4,
                label=label,
            )
            if slope is not None:
                ends = np.array([min(points)[0], max(points)[0]])
                axes.plot(
                    ends,
                    slope.factor * ends**slope.exponent,
                    color=COLOURS[number],
                    linestyle=LINES[estimator],
                    linewidth=1,
                )
    dress(axes, "xy", xlabel="N", ylabel="step", title="Times over N")
    axes.legend(frameon=False, fontsize="small")
