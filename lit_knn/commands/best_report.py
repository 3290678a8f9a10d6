"""Draws and prints the result of `lit-knn best`: the curve of all checkpoints, and the best of them."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from lit_knn.commands.best_tables import Key
from lit_knn.common.tables import TITLES, Row, number
from lit_knn.figures import average_curve, checkpoint_curve


def curve_of(rows: Sequence[Row], best: Row, key: Key, metric: str, title: str) -> Figure:
    """Return a picture of the metric of all checkpoints or averages, with the best one marked.

    Args:
        rows: rows of the table, ascending in the column `key`.
        best: one of the rows.
        key: the column that numbers the checkpoints.
        metric: name of the metric.
        title: title of the picture.
    """
    values = [number(row, metric) for row in rows]
    if key == "ema":
        lengths = [number(row, key) for row in rows]
        points = list(zip(lengths, values, strict=True))
        return average_curve(points, points[rows.index(best)], metric, title)

    images = [int(row[key]) for row in rows]
    seen = list(zip(images, values, strict=True))
    return checkpoint_curve(seen, seen[rows.index(best)], metric, title)


def description_of(best: Row, metric: str) -> str:
    """Return words on the best checkpoint: its values, step and images seen."""
    metrics = [name for name in best if name in TITLES] or [metric]
    values = [f"{TITLES.get(name, name)} {best[name]:.4g}" for name in metrics]
    place = f"step {best['step']:,}, {best['images_seen']:,} images seen"
    return f"{', '.join(values)}, {place}"


def summary_of_draws(metric: str, draws: Sequence[float]) -> str:
    """Describe the metric of every set of samples drawn from the best checkpoint.

    The checkpoint was chosen by the first set, so only the other sets are a fair measurement.

    Args:
        metric: name of the metric.
        draws: its value for each set of samples, at least two.
    """
    title = TITLES.get(metric, metric)
    values = ", ".join(f"{value:.4g}" for value in draws)
    least = f"The least, {min(draws):.4g}, is what EDM's authors report."
    mean = sum(draws[1:]) / (len(draws) - 1)
    fair = f"The mean of the draws that did not choose the checkpoint is {mean:.4g}"
    return f"{title} of {len(draws)} draws: {values}. {least} {fair}"
