"""Pictures of a run's checkpoints: a metric over the images seen in training, or over the length of an average."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from lit_knn.common.tables import TITLES
from lit_knn.figures.style import COLOURS, dress, image_unit, log_values, look

Points = Sequence[tuple[float, float]]


def checkpoint_curve(points: Points, best: tuple[int, float], metric: str, title: str) -> Figure:
    """Draw the metric of each checkpoint over images seen, and mark the best one.

    Args:
        points: (images seen, value), ascending.
        best: one of the points.
        metric: name of the column; it labels the axis.
        title: title of the picture.
    """
    unit, divisor = image_unit(points[-1][0])
    in_unit = [(seen / divisor, value) for seen, value in points]
    xlabel, at = f"Training images seen ({unit})", f"{best[0]:,} images"
    figure = _curve(in_unit, (best[0] / divisor, best[1]), at, xlabel, metric, title)
    if min(value for _, value in points) > 0:
        log_values(figure.axes[0])
    return figure


def average_curve(points: Points, best: tuple[float, float], metric: str, title: str) -> Figure:
    """Draw the metric of each average over its relative length, and mark the best one; see `checkpoint_curve`.

    The axis of the metric is linear, because the values differ little.
    """
    return _curve(points, best, f"{best[0]:g}", "Relative length of the average", metric, title)


def _curve(points: Points, best: tuple[float, float], at: str, xlabel: str, metric: str, title: str) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), **look(0))
    axes.plot(*best, "*", color=COLOURS[1], markersize=14, label=f"best: {best[1]:.4g} at {at}")
    dress(axes, xlabel=xlabel, ylabel=TITLES.get(metric, metric))
    axes.set_title(title, fontsize=10)
    axes.legend()
    return figure
