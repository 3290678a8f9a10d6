"""Pictures of one run: a metric of all its checkpoints or averages, with the best marked."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.common.tables import TITLES
from lit_knn.figures.style import OTHERS, dress, image_unit, log_axis

Pair = tuple[float, float]


def checkpoint_curve(
    points: Sequence[tuple[int, float]],
    best: tuple[int, float],
    metric: str,
    title: str,
) -> Figure:
    """Draw the metric of each checkpoint over images seen, and mark the best one.

    Args:
        points: images seen, ascending, and the values.
        best: one of the points.
        metric: name of the metric.
        title: title of the picture.
    """
    unit, divisor = image_unit(points[-1][0])
    in_unit = [(seen / divisor, value) for seen, value in points]
    seen, value = best

    figure, axes = _curve(in_unit, (seen / divisor, value), metric, title, place=f"{seen:,} images")
    logarithmic = log_axis(value for _, value in points)
    dress(axes, logarithmic, xlabel=f"Training images seen ({unit})")
    return figure


def average_curve(points: Sequence[Pair], best: Pair, metric: str, title: str) -> Figure:
    """Draw the metric of each average over its relative length, and mark the best one.

    The axis of the metric is linear, because the values differ little.

    Args:
        points: relative lengths, ascending, and the values.
        best: one of the points.
        metric: name of the metric.
        title: title of the picture.
    """
    figure, axes = _curve(points, best, metric, title, place=f"{best[0]:g}")
    dress(axes, xlabel="Relative length of the average")
    return figure


def _curve(
    points: Sequence[Pair],
    best: Pair,
    metric: str,
    title: str,
    place: str,
) -> tuple[Figure, Axes]:
    """Draw one curve and its best point.

    Args:
        points: the curve, by ascending x.
        best: one of the points.
        metric: name of the metric.
        title: title of the picture.
        place: where the best point is, as the legend says it.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    (curve, marker), (accent, _) = OTHERS[:2]

    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=curve, marker=marker, markersize=3)

    best_x, value = best
    label = f"best: {value:.4g} at {place}"
    axes.plot(best_x, value, "*", color=accent, markersize=14, label=label)

    axes.set_title(title, fontsize=10)
    axes.set_ylabel(TITLES.get(metric, metric))
    axes.legend()
    return figure, axes
