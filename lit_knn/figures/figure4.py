"""Figure 4 (fig:ablation): metrics over the images seen, with other k and other n."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.common.tables import TITLES
from lit_knn.figures.style import dress, image_unit
from lit_knn.figures.training_curves import (
    Points,
    TrainingCurve,
    best_point,
    draw_points,
    higher_is_better,
    looks_of,
    metrics_of,
)


def figure4(runs: Sequence[TrainingCurve]) -> Figure:
    """Draw Figure 4: a column per metric with two panels, in which k (above) and n (below) vary.

    Both panels also show the baseline, a run of the one-sample estimator, if there is one. Dotted
    lines show the best value of each curve, dashed lines the point where a curve passes the
    baseline's best.
    """
    metrics = metrics_of(runs)
    figure = Figure(figsize=(6 * len(metrics), 7), layout="constrained")
    grid = figure.subplots(2, len(metrics), sharex="col", squeeze=False)

    for upper, lower, metric in zip(*grid, metrics, strict=True):
        measured = [run for run in runs if metric in run.distances]
        without_k = [run for run in measured if run.k is None]
        last_images = max(run.distances[metric][-1][0] for run in measured)
        unit, divisor = image_unit(last_images)

        _draw_panel(upper, without_k + varied(measured, "k"), metric, divisor)
        upper.set_title("Effect of the search size k", fontsize=10)
        _draw_panel(lower, without_k + varied(measured, "n"), metric, divisor)
        lower.set_title("Effect of the sample size n", fontsize=10)
        lower.set_xlabel(f"Training images seen ({unit})")
    return figure


def varied(runs: Sequence[TrainingCurve], option: str) -> list[TrainingCurve]:
    """Select the runs that differ only in `option`, "k" or "n".

    All these runs have the same value of the other option: the most common one. In a tie it is the
    larger one.
    """
    by_other: dict[int, list[TrainingCurve]] = {}
    for run in runs:
        if run.k is not None:
            other = run.n if option == "k" else run.k
            by_other.setdefault(other or 0, []).append(run)
    if not by_other:
        return []

    most_common = max(by_other, key=lambda value: (len(by_other[value]), value))
    return sorted(by_other[most_common], key=lambda run: (run.k if option == "k" else run.n) or 0)


def _draw_panel(axes: Axes, runs: Sequence[TrainingCurve], metric: str, divisor: float) -> None:
    """Draw the curves of a panel of Figure 4, the best of each, and where it passes the baseline.

    Args:
        axes: the panel.
        runs: the runs of the panel, which all have the metric.
        metric: the metric.
        divisor: number of images in a unit of the axis.
    """
    dress(axes, "y", ylabel=TITLES.get(metric, metric))
    baseline = next((run for run in runs if run.estimator == "OneSample"), None)

    for run, look in zip(runs, looks_of(runs), strict=True):
        points = run.distances[metric]
        draw_points(axes, points, divisor, look, label=run.method)

        best = best_point(points, metric)[1]
        axes.axhline(best, color=look["color"], linestyle=":", linewidth=1)

        if baseline is not None:
            passed = passes(points, baseline.distances[metric], metric)
            if passed is not None:
                axes.axvline(passed / divisor, color=look["color"], linestyle="--", linewidth=1)

    axes.legend(fontsize=8)


def passes(points: Points, baseline: Points, metric: str) -> int | None:
    """Return the images seen when a curve is first better than the best of `baseline`, or None.

    Args:
        points: the curve.
        baseline: the other curve.
        metric: the metric of both.
    """
    best = best_point(baseline, metric)[1]
    sign = 1 if higher_is_better(metric) else -1

    for seen, value in points:
        if sign * value > sign * best:
            return seen
    return None
