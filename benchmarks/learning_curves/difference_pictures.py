"""Pictures of the differences between trained networks: their intervals, and the loss over the error."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.learning_curves.intervals import Difference
from benchmarks.learning_curves.statistics import Curves, Value
from benchmarks.learning_curves.titles import COMPARED, FINAL
from lit_knn.figures.style import Look, dress, looks

FIT = ("val_error", "held_out_loss")
EQUAL_ERROR, LEAST_LOSS = "loss_at_equal_error", "least_loss"
TITLES = {name: FINAL[name] for name in COMPARED}
TITLES |= {EQUAL_ERROR: "loss at an equal error", LEAST_LOSS: "least loss at held-out images"}
DRAWN = ("held_out_loss", EQUAL_ERROR, "val_error", "fd_features", "fd_pixels")


class Compared(NamedTuple):
    """The runs of a set, what is compared by name, and the differences of each estimator by the same names."""

    curves: Curves
    measures: dict[str, Value]
    differences: dict[str, dict[str, Difference]]


def picture(by_set: dict[str, Compared], reference: str) -> Figure:
    """Draw the intervals: a panel for each measure, a line for each estimator, a colour for each set."""
    estimators = list(dict.fromkeys(name for each in by_set.values() for name in each.differences))
    places = {name: -place for place, name in enumerate(estimators)}
    styles = looks(by_set)
    # The sets lie beside each other within the line of an estimator.
    shifts = dict(zip(by_set, np.linspace(0.2, -0.2, len(by_set) + 2)[1:-1], strict=True))

    drawn = [name for name in DRAWN if any(name in each.measures for each in by_set.values())]
    figure = Figure(figsize=(2.7 * len(drawn), 0.45 * len(estimators) + 1.4), layout="constrained")
    panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    for axes, measure in zip(panels, drawn, strict=True):
        axes.axvline(0, color="0.4", linewidth=0.8)
        for name, each in by_set.items():
            for estimator, differences in each.differences.items():
                if measure in differences and differences[measure].alone.seeds > 1:
                    height = places[estimator] + shifts[name]
                    _draw(axes, differences[measure], height, styles[name], name)
        dress(axes, title=TITLES[measure])
        axes.xaxis.set_major_locator(MaxNLocator(4))
    panels[0].set_yticks(list(places.values()), list(places))
    panels[0].set_ylabel(f"minus {reference}")
    lines = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    columns = min(len(lines), 3)
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=columns, frameon=False
    )
    return figure


def fit_picture(by_set: dict[str, Compared]) -> Figure:
    """Draw the loss at new images over the error against the exact target: thin lines for seeds, thick ones for means.

    The error falls along a training, so its axis is reversed. The first quarter of the measurements, in which both are
    far larger, is left out. A panel for each set.
    """
    figure = Figure(figsize=(4.2 * len(by_set), 3.8), layout="constrained")
    panels = figure.subplots(1, len(by_set), squeeze=False)[0]
    # The sets may have other estimators, but each estimator has one look in all panels.
    styles = looks(estimator for each in by_set.values() for estimator in each.curves.estimators)
    lines = {}
    for axes, (name, each) in zip(panels, by_set.items(), strict=True):
        curves = each.curves
        for estimator in curves.estimators:
            style = styles[estimator]
            for seed in curves.seeds(estimator):
                run = [_later(curves.column(estimator, seed, column)) for column in FIT]
                axes.plot(*run, color=style["color"], linewidth=0.6, alpha=0.5)
            means = [_later(curves.band(estimator, column)[1]) for column in FIT]
            lines[estimator] = axes.plot(*means, **style)[0]
        dress(axes, title=name, xlabel=f"{FINAL['val_error']} (falls along the training)")
        axes.invert_xaxis()
    panels[0].set_ylabel(FINAL["held_out_loss"])
    figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)
    return figure


def _later(values: np.ndarray) -> np.ndarray:
    return values[len(values) // 4 :]


def _draw(axes: Axes, difference: Difference, height: float, style: Look, name: str) -> None:
    """Draw the interval that holds together with others as a thin line, and the one that holds alone over it."""
    mean, colour = difference.alone.mean, style["color"]
    axes.errorbar(mean, height, xerr=difference.together.half_width, color=colour, linewidth=0.7)
    axes.errorbar(
        mean,
        height,
        xerr=difference.alone.half_width,
        color=colour,
        marker=style["marker"],
        markersize=4,
        linewidth=2.2,
        label=name,
    )
