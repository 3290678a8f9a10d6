"""Figure 3 (fig:estimator_perf): MSE, squared bias and variance of estimators over noise levels."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

# Told apart in print and by the colour-blind (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8c8c8c")
MARKERS = "osD^vP*X"
QUANTITIES = {"mse": "MSE", "bias_sq_corrected": "squared bias", "variance": "variance"}
PREFIXES = {"score": "score, per dimension", "mu": "posterior mean, per dimension"}
DECADES, MOST_DECADES = 4.0, 14.0


def error_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw score errors above and posterior mean errors below, one column per quantity, one colour per estimator.

    The squared bias is the corrected one, shown where it is above three standard errors. Bands are one standard error.

    Args:
        rows: of `estimator_error.csv`, one for each estimator and noise level.
    """
    names = list(dict.fromkeys(row["estimator"] for row in rows))
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey="row")
    for row_of_axes, (prefix, label) in zip(grid, PREFIXES.items(), strict=True):
        for axes, (quantity, title) in zip(row_of_axes, QUANTITIES.items(), strict=True):
            _style(axes, title if prefix == "score" else "", "noise level $t$" if prefix == "mu" else "")
            for i, name in reversed(list(enumerate(names))):  # the first named is drawn last, on top
                own = sorted((row for row in rows if row["estimator"] == name), key=lambda row: row["t"])
                _draw_curve(axes, own, f"{prefix}_{quantity}", COLOURS[i % 8], MARKERS[i % 8], name)
        row_of_axes[0].set_ylabel(label)
        _fit_limits(row_of_axes[0], rows, f"{prefix}_mse")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=min(len(names), 6), frameon=False)
    return figure


def _draw_curve(
    axes: Axes, rows: Sequence[Mapping[str, Any]], column: str, colour: str, marker: str, label: str
) -> None:
    """One curve, with gaps where a value is unknown, has no logarithm or is a bias that may be none."""
    t, values, errors = [], [], []
    for row in rows:
        value, error = (math.nan if row[name] == "" else row[name] for name in (column, f"{column}_se"))
        hidden = not value > 0 or ("bias" in column and value < 3 * error)
        t.append(row["t"])
        values.append(math.nan if hidden else value)
        errors.append(error if math.isfinite(error) else 0.0)
    axes.plot(t, values, color=colour, marker=marker, markersize=3, linewidth=1.4, label=label)
    low = [max(value - error, value / 10) for value, error in zip(values, errors, strict=True)]
    high = [value + error for value, error in zip(values, errors, strict=True)]
    axes.fill_between(t, low, high, color=colour, alpha=0.15, linewidth=0)


def _style(axes: Axes, title: str, xlabel: str) -> None:
    axes.set(xscale="log", yscale="log", title=title, xlabel=xlabel)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _fit_limits(axes: Axes, rows: Sequence[Mapping[str, Any]], column: str) -> None:
    """Show each curve down to `DECADES` below its peak, but no rounding errors of exact zeros."""
    shown = [(row["estimator"], row[column]) for row in rows if math.isfinite(row[column]) and row[column] > 0]
    if shown:
        peaks = {name: max(value for other, value in shown if other == name) for name, _ in shown}
        top, lowest = 3 * max(peaks.values()), min(value for _, value in shown)
        floor = max(min(peaks.values()) / 10**DECADES, top / 10**MOST_DECADES)
        axes.set_ylim(max(lowest / 3, floor), top)
