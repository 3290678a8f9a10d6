"""The picture of Figure 5 (fig:diffusion_init): sample quality against t_switch."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.results import Row

# Told apart in grey, too.
MARKERS = "osD^vPX*"


def hybrid_figure(rows: Sequence[Row], metric: str, baseline: str) -> Figure:
    """Draw the distance to the data and the copied fraction against t_switch, one line for each method.

    Args:
        rows: with `method`, `t_switch`, `copied_fraction` and the column `metric`.
        metric: name of the distance, a column of `rows`.
        baseline: the method drawn dashed and black.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    for axes, column in ((left, metric), (right, "copied_fraction")):
        for number, method in enumerate(methods):
            points = sorted((row["t_switch"], row[column]) for row in rows if row["method"] == method)
            style = {"color": "black", "linestyle": "--", "zorder": 3} if method == baseline else {}
            marker = {"marker": MARKERS[number % len(MARKERS)], "markersize": 5, "markerfacecolor": "none"}
            axes.plot(*zip(*points, strict=True), label=method, **marker, **style)
        _dress(axes)
    left.set_ylim(bottom=0)  # not logarithmic: that would blow up the differences between draws of equal quality
    left.set_ylabel(metric)
    right.set_ylabel("copied fraction")
    right.set_ylim(-0.03, 1.03)
    left.legend()
    return figure


def _dress(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("$t_{\\mathrm{switch}}$")
    axes.grid(alpha=0.3)
