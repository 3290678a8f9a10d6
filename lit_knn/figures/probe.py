"""The picture of `lit-knn probe`: what better targets would bring on a data set."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.figures.style import dress, looks

# Title, and columns with their names in the picture, which also say the colour.
PANELS: dict[str, dict[str, str]] = {
    "Squared error of denoisers, per dimension": {
        "wiener_held_out": "linear denoiser (Wiener), at images held out",
        "held_out": "mean of this set (Exact), at images held out",
        "irreducible": "least loss on this set = noise of OneSample",
    },
    "Noise that an estimator leaves, as a share of OneSample's": {
        "STF": "STF",
        "KNN": "KNN",
        "SubspaceKNN": "SubspaceKNN",
    },
    "Over how many images the posterior spreads": {
        "images": "exponential of the exact posterior's entropy",
    },
}
# No axis goes below this: smaller values are rounding, or as good as 0.
LOWEST = 1e-6
# Edges of the bars in the histogram of noise levels.
EDGES = 80


def probe_figure(rows: Sequence[Mapping[str, float]], sigma: np.ndarray) -> Figure:
    """Draw a probe over the noise level.

    Args:
        rows: those of `probe.csv`; NaN where a value cannot be told.
        sigma: draws from the noise levels of a training.
    """
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    # In this order, by columns, panels[1] and `training` are the lower two.
    *panels, training = figure.subplots(2, 2, sharex=True).T.flat

    for axes, (title, columns) in zip(panels, PANELS.items(), strict=True):
        _draw_panel(axes, rows, columns)
        axes.set_title(title)

    _draw_training(training, rows, sigma)
    for axes in (panels[1], training):
        axes.set_xlabel("noise level $t$")
    return figure


def _draw_panel(
    axes: Axes,
    rows: Sequence[Mapping[str, float]],
    columns: Mapping[str, str],
) -> None:
    """Draw columns with their standard errors; the legend says which values are below the axis.

    Args:
        axes: the panel.
        rows: those of `probe.csv`.
        columns: columns, which need not be there, with their names in the picture.
    """
    dress(axes, "xy")
    styles = looks(columns.values())
    t = [row["t"] for row in rows]

    curves = {}
    for column, name in columns.items():
        if column in rows[0]:
            values = [row[column] for row in rows]
            errors = [row[f"{column}_se"] for row in rows]
            curve = axes.errorbar(t, values, errors, **styles[name])
            curves[name] = curve, values

    bottom, top = axes.get_ylim()
    bottom = max(bottom, LOWEST)
    axes.set_ylim(bottom, top)
    for name, (curve, values) in curves.items():
        curve.set_label(name + _note_on_hidden(values, bottom))
    _draw_legend(axes)


def _draw_legend(axes: Axes) -> None:
    """Draw the legend below the panel and its axis label, because curves may be anywhere in the panel."""
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), frameon=False, fontsize="small")


def _note_on_hidden(values: Sequence[float], bottom: float) -> str:
    """Return the words for the legend that say at how many noise levels a curve is below the axis, or ""."""
    known = [value for value in values if not math.isnan(value)]
    hidden = [value for value in known if value < bottom]
    if not hidden:
        return ""
    if len(hidden) == len(known):
        return f"\n(below the axis, at most {max(known):.1g})"
    return f"\n(below the axis at {len(hidden)} of {len(known)} levels)"


def _draw_training(axes: Axes, rows: Sequence[Mapping[str, float]], sigma: np.ndarray) -> None:
    """Draw a histogram of a training's noise levels, and the share of posteriors that are one image.

    Args:
        axes: the panel.
        rows: those of `probe.csv`.
        sigma: draws from the noise levels of the training.
    """
    t = [row["t"] for row in rows]
    counts, edges = np.histogram(sigma, np.geomspace(t[0], t[-1], EDGES))
    heights = counts / max(counts.max(), 1)
    axes.stairs(heights, edges, fill=True, color="0.8", label="noise levels of the training")

    collapsed = [row["collapsed"] for row in rows]
    label = "posteriors that are one image: better targets buy nothing"
    axes.plot(t, collapsed, "k-", label=label)

    of_a_tenth = [row["collapsed_tenth"] for row in rows]
    axes.plot(t, of_a_tenth, "k:", label="the same with a tenth of the images")

    dress(axes, "x", title="What a training meets", ylim=(0, 1.05), yticks=(0, 0.5, 1))
    _draw_legend(axes)
