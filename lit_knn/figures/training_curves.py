"""Pictures of training runs: metrics over the images seen, times, Figure 4 (fig:ablation), and kept checkpoints."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.common.tables import TITLES
from lit_knn.figures.style import OTHERS, dress, image_unit, looks

HIGHER_IS_BETTER = {"inception_score", "precision", "recall"}

Pair = tuple[float, float]
Points = Sequence[tuple[int, float]]  # (images seen, value), ascending


@dataclass(frozen=True)
class TrainingCurve:
    """Holds what the pictures show of one run."""

    name: str
    estimator: str  # class name
    k: int | None = None  # neighbours searched
    n: int | None = None  # samples drawn
    distances: Mapping[str, Points] = field(default_factory=dict)  # by metric
    ms_per_image: tuple[float, float] = (0.0, 0.0)  # milliseconds of training of the estimator and of the rest

    @property
    def method(self) -> str:
        """The estimator's class name, with k and n if it has them: `KNN k=2048, n=256`."""
        counts = ", ".join(f"{name}={value}" for name, value in (("k", self.k), ("n", self.n)) if value is not None)
        return f"{self.estimator} {counts}".strip()


def higher_is_better(metric: str) -> bool:
    """Tell whether larger values of a metric are better; metrics of held-out images have their own names."""
    return metric.removesuffix("_held_out") in HIGHER_IS_BETTER


def best_point(points: Points, metric: str) -> tuple[int, float]:
    """Return the first point with the best value of the metric."""
    return (max if higher_is_better(metric) else min)(points, key=lambda point: point[1])


def passes(points: Points, baseline: Points, metric: str) -> int | None:
    """Return the images seen when a curve is first better than the best of `baseline`; None if it never is."""
    best, sign = best_point(baseline, metric)[1], 1 if higher_is_better(metric) else -1
    return next((seen for seen, value in points if sign * value > sign * best), None)


def run_comparison(runs: Sequence[TrainingCurve]) -> Figure:
    """Draw one panel per metric over images seen, with a line per run, and bars of the time per image."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.distances))
    figure = Figure(figsize=(4.2 * (len(metrics) + 1), 3.8), layout="constrained")
    *panels, bars = figure.subplots(1, len(metrics) + 1, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_metric(axes, runs, metric)
    _draw_times(bars, runs)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _looks(runs: Sequence[TrainingCurve]) -> list[tuple[TrainingCurve, dict[str, Any]]]:
    """Pair each run with its look, which is that of its estimator."""
    return list(zip(runs, looks(f"{run.method} {number}" for number, run in enumerate(runs)).values(), strict=True))


def _log(points: Points) -> str:
    """Return the logarithmic axes of a picture: a distance of 0 has no logarithm."""
    return "y" if min(value for _, value in points) > 0 else ""


def _draw_metric(axes: Axes, runs: Sequence[TrainingCurve], metric: str) -> None:
    points = [point for run in runs for point in run.distances.get(metric, ())]
    unit, divisor = image_unit(max(seen for seen, _ in points))
    for run, style in _looks(runs):
        own = run.distances.get(metric, ())
        axes.plot([seen / divisor for seen, _ in own], [value for _, value in own], **style)
    dress(axes, _log(points), xlabel=f"Training images seen ({unit})", ylabel=TITLES.get(metric, metric))


def _draw_times(axes: Axes, runs: Sequence[TrainingCurve]) -> None:
    for number, (run, style) in enumerate(_looks(runs)):
        estimator, rest = run.ms_per_image
        axes.barh(number, rest, height=0.6, color=style["color"], label=f"{run.name} {run.method}")
        axes.barh(number, estimator, height=0.6, left=rest, color="0.3")
    dress(axes, xlabel="ms per image (dark: estimator)")
    axes.set_yticks([])
    axes.invert_yaxis()


def figure4(runs: Sequence[TrainingCurve]) -> Figure:
    """Draw Figure 4: a column per metric with two panels, in which k (above) and n (below) vary.

    Both panels also show the baseline, a run of the one-sample estimator, if there is one. Dotted lines show the best
    value of each curve, dashed lines the point where a curve passes the baseline's best.
    """
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.distances))
    figure = Figure(figsize=(6 * len(metrics), 7), layout="constrained")
    for column, metric in zip(figure.subplots(2, len(metrics), sharex="col", squeeze=False).T, metrics, strict=True):
        measured = [run for run in runs if metric in run.distances]
        unit, divisor = image_unit(max(seen for run in measured for seen, _ in run.distances[metric]))
        for axes, option, title in zip(column, ("k", "n"), ("search size k", "sample size n"), strict=True):
            dress(axes, "y", ylabel=TITLES.get(metric, metric))
            axes.set_title(f"Effect of the {title}", fontsize=10)
            without_k = [run for run in measured if run.k is None]
            _panel(axes, [*without_k, *varied(measured, option)], metric, divisor)
        column[-1].set_xlabel(f"Training images seen ({unit})")
    return figure


def varied(runs: Sequence[TrainingCurve], option: str) -> list[TrainingCurve]:
    """Select the runs that differ only in `option`, "k" or "n".

    All these runs have the same value of the other option: the most common one. In a tie it is the larger one.
    """
    searching = [run for run in runs if run.k is not None]
    other = "n" if option == "k" else "k"
    counts = Counter(getattr(run, other) for run in searching)
    common = max(counts, key=lambda value: (counts[value], value or 0), default=None)
    chosen = (run for run in searching if getattr(run, other) == common)
    return sorted(chosen, key=lambda run: getattr(run, option) or 0)


def _panel(axes: Axes, runs: Sequence[TrainingCurve], metric: str, divisor: float) -> None:
    baseline = next((run for run in runs if run.estimator == "OneSample"), None)
    for run, style in _looks(runs):
        points = run.distances[metric]
        axes.plot([seen / divisor for seen, _ in points], [value for _, value in points], label=run.method, **style)
        axes.axhline(best_point(points, metric)[1], color=style["color"], linestyle=":", linewidth=1)
        passed = passes(points, baseline.distances[metric], metric) if baseline else None
        if passed is not None:
            axes.axvline(passed / divisor, color=style["color"], linestyle="--", linewidth=1)
    axes.legend(fontsize=8)


def checkpoint_curve(points: Points, best: tuple[int, float], metric: str, title: str) -> Figure:
    """Draw the metric of each checkpoint over images seen, and mark `best`, which is one of the points."""
    unit, divisor = image_unit(points[-1][0])
    in_unit = [(seen / divisor, value) for seen, value in points]
    xlabel, at = f"Training images seen ({unit})", f"{best[0]:,} images"
    return _curve(in_unit, (best[0] / divisor, best[1]), at, xlabel, metric, title, _log(points))


def average_curve(points: Sequence[Pair], best: Pair, metric: str, title: str) -> Figure:
    """Draw the metric of each average over its relative length, and mark the best one; see `checkpoint_curve`.

    The axis of the metric is linear, because the values differ little.
    """
    return _curve(points, best, f"{best[0]:g}", "Relative length of the average", metric, title)


def _curve(points: Sequence[Pair], best: Pair, at: str, xlabel: str, metric: str, title: str, log: str = "") -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    (curve, marker), (accent, _) = OTHERS[:2]
    axes.plot(*zip(*points, strict=True), color=curve, marker=marker, markersize=3)
    axes.plot(*best, "*", color=accent, markersize=14, label=f"best: {best[1]:.4g} at {at}")
    dress(axes, log, xlabel=xlabel, ylabel=TITLES.get(metric, metric))
    axes.set_title(title, fontsize=10)
    axes.legend()
    return figure
