"""Figure 5 (fig:diffusion_init): sample quality against t_switch."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from lit_knn.common.tables import TITLES, Row, number
from lit_knn.figures.style import dress, looks


def figure5(rows: Sequence[Row], metric: str, baseline: str) -> Figure:
    """Draw the distance to the data and the copied fraction against t_switch, a line per method.

    Args:
        rows: each has `method`, `t_switch`, `copied_fraction` and a distance.
        metric: the column of the distance.
        baseline: the method that is dashed and grey.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = looks(str(row["method"]) for row in rows)
    if baseline in styles:
        styles[baseline] |= {"color": "0.5", "linestyle": "--", "marker": ""}

    for axes, column in ((left, metric), (right, "copied_fraction")):
        for method, style in styles.items():
            of_method = [row for row in rows if row["method"] == method]
            of_method.sort(key=lambda row: row["t_switch"])
            t_switch = [number(row, "t_switch") for row in of_method]
            values = [number(row, column) for row in of_method]
            axes.plot(t_switch, values, label=method, **style)
        dress(axes, "x", xlabel="$t_{\\mathrm{switch}}$", ylabel=column.replace("_", " "))

    # The axis is linear: a logarithmic one would exaggerate the differences between draws of equal
    # quality.
    left.set(ylim=(0, None), ylabel=TITLES.get(metric, metric))
    # Marks at 0 and 1 need room.
    right.set_ylim(-0.03, 1.03)
    left.legend()
    return figure
