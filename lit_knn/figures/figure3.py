"""Figure 3 (fig:estimator_perf): MSE, squared bias and variance of estimators over noise levels."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_knn.figures.style import dress, looks

QUANTITIES = {"mse": "MSE", "bias_sq_corrected": "squared bias", "variance": "variance"}
PREFIXES = {"score": "score, per dimension", "mu": "posterior mean, per dimension"}
# The axis reaches `DECADES` below the peak of each curve, but at most `ABOVE` and `BELOW` decades from the middle peak.
DECADES, ABOVE, BELOW = 4.0, 6.0, 10.0
# A bias within this number of standard errors of 0 may be 0.
UNTOLD = 2.0
# Distance between the rows of marks for zeros, as a share of the axis.
MARK_STEP = 0.03
ZERO_MARKER = "x"


def figure3(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw score errors above and posterior mean errors below, one column per quantity, one colour per estimator.

    `rows` are those of `estimator_error.csv`, one for each estimator and noise level. The squared bias is the corrected
    one. Where it is within two standard errors of 0, a hollow mark shows its upper limit, two standard errors above the
    estimate or, if that is negative, above 0. Bands are one standard error. A logarithmic axis cannot show exact zeros:
    they are marks at the foot, in one row per estimator.
    """
    styles = looks(row["estimator"] for row in rows)
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey="row")
    any_zero = any_limit = False
    for row_of_axes, (prefix, label) in zip(grid, PREFIXES.items(), strict=True):
        for axes, (quantity, title) in zip(row_of_axes, QUANTITIES.items(), strict=True):
            dress(axes, "xy", **({"title": title} if prefix == "score" else {"xlabel": "noise level $t$"}))
            for i, (name, style) in enumerate(styles.items()):
                own = sorted((row for row in rows if row["estimator"] == name), key=lambda row: row["t"])
                column = f"{prefix}_{quantity}"
                _draw_curve(axes, own, column, style)
                any_limit |= "bias" in quantity and _mark_limits(axes, own, column, style)
                any_zero |= _mark_zeros(axes, [row["t"] for row in own if row[column] == 0], i, style)
        row_of_axes[0].set_ylabel(label)
        _fit_limits(row_of_axes[0], rows, f"{prefix}_mse")
    handles, labels = grid[0][0].get_legend_handles_labels()
    special = [("o", "hollow: bias below this", any_limit), (ZERO_MARKER, "at the foot: 0", any_zero)]
    for marker, label, there in special:
        if there:
            mark = Line2D([], [], color="0.4", marker=marker, markersize=3, fillstyle="none", linestyle="none")
            handles, labels = [*handles, mark], [*labels, label]
    figure.legend(handles, labels, loc="outside lower center", ncols=7, columnspacing=1.4, frameon=False)
    return figure


def _draw_curve(axes: Axes, rows: Sequence[Mapping[str, Any]], column: str, style: dict[str, Any]) -> None:
    """Draw one curve, with gaps for values that are unknown, have no logarithm, or are biases within their error."""
    t, values, errors = [], [], []
    for row in rows:
        value, error = (math.nan if row[name] == "" else row[name] for name in (column, f"{column}_se"))
        hidden = not value > 0 or ("bias" in column and value < UNTOLD * error)
        t.append(row["t"])
        values.append(math.nan if hidden else value)
        errors.append(error if math.isfinite(error) else 0.0)
    (line,) = axes.plot(t, values, label=rows[0]["estimator"], **style)
    low = [max(value - error, value / 10) for value, error in zip(values, errors, strict=True)]
    high = [value + error for value, error in zip(values, errors, strict=True)]
    axes.fill_between(t, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _mark_limits(axes: Axes, rows: Sequence[Mapping[str, Any]], column: str, style: dict[str, Any]) -> bool:
    """Mark the upper limits of biases that may be 0; return True if there are any."""
    known = [(row["t"], row[column], row[f"{column}_se"]) for row in rows if row[column] != ""]
    limits = [(t, max(value, 0.0) + UNTOLD * error) for t, value, error in known if value < UNTOLD * error]
    if limits:
        axes.plot(*zip(*limits, strict=True), **style | {"linestyle": "none", "fillstyle": "none", "markersize": 4})
    return len(limits) > 0


def _mark_zeros(axes: Axes, t: Sequence[float], number: int, style: dict[str, Any]) -> bool:
    """Mark the noise levels of an estimator's zeros at the foot of the axes; return True if there are zeros."""
    if t:
        marks = Line2D(t, [MARK_STEP * (number + 1)] * len(t), **style)
        marks.set(linestyle="none", fillstyle="none", marker=ZERO_MARKER, transform=axes.get_xaxis_transform())
        axes.add_line(marks)
    return len(t) > 0


def _fit_limits(axes: Axes, rows: Sequence[Mapping[str, Any]], column: str) -> None:
    """Show each curve down to `DECADES` below its peak, except curves far from the others, such as rounding errors."""
    shown = [(row["estimator"], row[column]) for row in rows if math.isfinite(row[column]) and row[column] > 0]
    if shown:
        peaks = sorted(max(value for other, value in shown if other == name) for name in {name for name, _ in shown})
        middle, lowest = peaks[len(peaks) // 2], min(value for _, value in shown)
        floor = max(lowest / 3, peaks[0] / 10**DECADES, middle / 10**BELOW)
        axes.set_ylim(floor, min(3 * peaks[-1], middle * 10**ABOVE))
