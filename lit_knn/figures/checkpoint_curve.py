"""The picture of a run's checkpoints: a metric over the images seen in training."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from lit_knn.results import TITLES


def checkpoint_curve(points: Sequence[tuple[int, float]], best: tuple[int, float], metric: str, title: str) -> Figure:
    """Draw the metric of each checkpoint over images seen, the best one marked.

    Args:
        points: images seen and value, ascending.
        best: one of them.
        metric: name of the column, by which the axis is labelled.
        title: of the picture.
    """
    unit, divisor = image_unit(points[-1][0])
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([seen / divisor for seen, _ in points], [value for _, value in points], marker=".")
    label = f"best: {best[1]:.4g} at {best[0]:,} images"
    axes.plot(best[0] / divisor, best[1], "*", color="C3", markersize=14, label=label)
    axes.set_xlabel(f"Training images seen ({unit})")
    axes.set_ylabel(TITLES.get(metric, metric))
    axes.set_title(title, fontsize=10)
    if min(value for _, value in points) > 0:
        log_axis(axes)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure


def log_axis(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with numbers between the powers of ten where there is room."""
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def image_unit(images: int) -> tuple[str, float]:
    """Unit and divisor of an axis up to `images`: thousands for the digits, millions for the paper's runs."""
    return ("millions", 1e6) if images >= 1e6 else ("thousands", 1e3)
