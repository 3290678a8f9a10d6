"""Figure 3 (fig:estimator_perf): MSE, squared bias and variance of estimators over noise levels."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_knn.common.tables import Row, number
from lit_knn.figures.style import Look, dress, looks

QUANTITIES = {"mse": "MSE", "bias_sq_corrected": "squared bias", "variance": "variance"}
PREFIXES = {"score": "score, per dimension", "mu": "posterior mean, per dimension"}
# The axis reaches this number of decades below the peak of every curve, so that each can be seen.
DECADES_OF_A_CURVE = 4.0
# But it ends at most this number of decades above and below the middle one of the peaks.
MOST_DECADES_ABOVE, MOST_DECADES_BELOW = 6.0, 10.0
# The room between a curve and the end of the axis, as a factor.
ROOM = 3.0
# A bias within this number of standard errors of 0 may be 0.
UNCERTAIN = 2.0
# Distance between the rows of marks for zeros, as a share of the axis.
MARK_STEP = 0.03
ZERO_MARKER = "x"


def figure3(rows: Sequence[Row]) -> Figure:
    """Draw score errors above and posterior mean errors below, one column per quantity.

    `rows` are those of `estimator_error.csv`, one for each estimator and noise level. Each
    estimator has one colour. The squared bias is the corrected one. Where it is within two standard
    errors of 0, a hollow mark shows its upper limit, two standard errors above the estimate or, if
    that is negative, above 0. Bands are one standard error. A logarithmic axis cannot show exact
    zeros: they are marks at the foot, in one row per estimator.
    """
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey="row")
    any_zero = any_limit = False

    for row_of_axes, (prefix, label) in zip(grid, PREFIXES.items(), strict=True):
        for axes, quantity in zip(row_of_axes, QUANTITIES, strict=True):
            limits, zeros = _draw_panel(axes, rows, f"{prefix}_{quantity}")
            any_limit |= limits
            any_zero |= zeros
        row_of_axes[0].set_ylabel(label)
        _fit_limits(row_of_axes[0], rows, f"{prefix}_mse")

    for upper, lower, title in zip(*grid, QUANTITIES.values(), strict=True):
        upper.set_title(title)
        lower.set_xlabel("noise level $t$")

    _draw_legend(figure, any_limit, any_zero)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Row], column: str) -> tuple[bool, bool]:
    """Draw one column of the table; return whether the panel marks upper limits, and whether it marks zeros."""
    dress(axes, "xy")
    any_limit = any_zero = False

    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(str(row["estimator"]), []).append(row)
    by_look = looks(by_name)

    # Each estimator has its own row of marks at the foot, in the order of the looks.
    for place, (name, look) in enumerate(by_look.items(), start=1):
        of_estimator = sorted(by_name[name], key=lambda row: row["t"])
        _draw_curve(axes, of_estimator, column, look)
        if "bias" in column:
            any_limit |= _mark_limits(axes, of_estimator, column, look)
        any_zero |= _mark_zeros(axes, of_estimator, column, look, height=place * MARK_STEP)
    return any_limit, any_zero


def _draw_legend(figure: Figure, any_limit: bool, any_zero: bool) -> None:
    """Draw the legend of all panels, which also explains the marks that they have."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    marks = []
    if any_limit:
        marks.append(("o", "hollow: bias below this"))
    if any_zero:
        marks.append((ZERO_MARKER, "at the foot: 0"))

    for marker, label in marks:
        mark = Line2D([], [], color="0.4", marker=marker, markersize=3, linestyle="none")
        mark.set_fillstyle("none")
        handles.append(mark)
        labels.append(label)

    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=7,
        columnspacing=1.4,
        frameon=False,
    )


def _draw_curve(axes: Axes, rows: Sequence[Row], column: str, look: Look) -> None:
    """Draw one curve and its band.

    It has gaps where values are unknown, have no logarithm, or are biases within their error.

    Args:
        axes: the panel.
        rows: rows of one estimator, by noise level.
        column: the quantity.
        look: look of the estimator.
    """
    t, values, low, high = [], [], [], []
    for row in rows:
        value = number(row, column)
        error = number(row, f"{column}_se")
        uncertain_bias = "bias" in column and value < UNCERTAIN * error
        if uncertain_bias or not value > 0:
            value = math.nan
        if not math.isfinite(error):
            error = 0.0

        t.append(number(row, "t"))
        values.append(value)
        # On a logarithmic axis a band cannot reach 0, so it ends a decade below the curve.
        low.append(max(value - error, value / 10))
        high.append(value + error)

    (line,) = axes.plot(t, values, label=str(rows[0]["estimator"]), **look)
    axes.fill_between(t, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _mark_limits(axes: Axes, rows: Sequence[Row], column: str, look: Look) -> bool:
    """Mark the upper limits of biases that may be 0; return True if there are any.

    Args:
        axes: the panel.
        rows: rows of one estimator, by noise level.
        column: the squared bias.
        look: look of the estimator.
    """
    t, limits = [], []
    for row in rows:
        value = number(row, column)
        margin = UNCERTAIN * number(row, f"{column}_se")
        if value < margin:
            t.append(number(row, "t"))
            limits.append(max(value, 0.0) + margin)

    if limits:
        (marks,) = axes.plot(t, limits, **look)
        marks.set(linestyle="none", fillstyle="none", markersize=4)
    return len(limits) > 0


def _mark_zeros(
    axes: Axes,
    rows: Sequence[Row],
    column: str,
    look: Look,
    height: float,
) -> bool:
    """Mark the zeros of an estimator at the foot of the axes; return True if there are any.

    Args:
        axes: the panel.
        rows: rows of one estimator.
        column: the quantity.
        look: look of the estimator.
        height: height of the marks, as a share of the axis.
    """
    t = [number(row, "t") for row in rows if row[column] == 0]
    if t:
        marks = Line2D(t, [height] * len(t), color=look["color"], marker=ZERO_MARKER)
        marks.set(linestyle="none", fillstyle="none", markersize=look["markersize"])
        marks.set(zorder=look["zorder"], transform=axes.get_xaxis_transform())
        axes.add_line(marks)
    return len(t) > 0


def _fit_limits(axes: Axes, rows: Sequence[Row], column: str) -> None:
    """Set the ends of the vertical axis.

    Even the lowest curve is shown to some decades below its peak. Only curves that are very far from the others, such
    as rounding errors, are not in the picture.

    Args:
        axes: the panel.
        rows: all rows.
        column: the quantity.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        value = number(row, column)
        if math.isfinite(value) and value > 0:
            values.setdefault(str(row["estimator"]), []).append(value)
    if not values:
        return

    peaks = sorted(max(of_estimator) for of_estimator in values.values())
    smallest_peak, middle_peak, largest_peak = peaks[0], peaks[len(peaks) // 2], peaks[-1]
    lowest = min(min(of_estimator) for of_estimator in values.values())

    floor = max(
        lowest / ROOM,
        smallest_peak / 10**DECADES_OF_A_CURVE,
        middle_peak / 10**MOST_DECADES_BELOW,
    )
    ceiling = min(ROOM * largest_peak, middle_peak * 10**MOST_DECADES_ABOVE)
    axes.set_ylim(floor, ceiling)
