"""Picture of a run's checkpoints: a metric over the images seen in training."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from lit_knn.figures.style import COLOURS, dress, image_unit, log_values, look
from lit_knn.results import TITLES


def checkpoint_curve(points: Sequence[tuple[int, float]], best: tuple[int, float], metric: str, title: str) -> Figure:
    """Draw the metric of each checkpoint over images seen, and mark the best one.

    Args:
        points: (images seen, value), ascending.
        best: one of the points.
        metric: name of the column; it labels the axis.
        title: title of the picture.
    """
    unit, divisor = image_unit(points[-1][0])
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([seen / divisor for seen, _ in points], [value for _, value in points], **look(0))
    label = f"best: {best[1]:.4g} at {best[0]:,} images"
    axes.plot(best[0] / divisor, best[1], "*", color=COLOURS[1], markersize=14, label=label)
    dress(axes, xlabel=f"Training images seen ({unit})", ylabel=TITLES.get(metric, metric))
    axes.set_title(title, fontsize=10)
    if min(value for _, value in points) > 0:
        log_values(axes)
    axes.legend()
    return figure
