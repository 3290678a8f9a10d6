"""Pictures of training runs: metrics over the images seen, times, and Figure 4 (fig:ablation)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.common.tables import TITLES
from lit_knn.figures.style import dress, image_unit, log_axis, looks

HIGHER_IS_BETTER = {"inception_score", "precision", "recall"}
# The estimator's part of a bar of times.
HATCHED: dict[str, Any] = {"facecolor": "white", "hatch": "////"}

Points = Sequence[tuple[int, float]]  # (images seen, value), ascending


@dataclass(frozen=True)
class TrainingCurve:
    """Holds what the pictures show of one run."""

    name: str
    estimator: str  # class name
    k: int | None = None  # neighbours searched
    n: int | None = None  # samples drawn
    distances: Mapping[str, Points] = field(default_factory=dict)  # by metric
    # Milliseconds of training: of the estimator, and of the rest.
    ms_per_image: tuple[float, float] = (0.0, 0.0)

    @property
    def method(self) -> str:
        """The estimator's class name, with k and n if it has them: `KNN k=2048, n=256`."""
        counts = []
        if self.k is not None:
            counts.append(f"k={self.k}")
        if self.n is not None:
            counts.append(f"n={self.n}")
        return f"{self.estimator} {', '.join(counts)}".strip()


def higher_is_better(metric: str) -> bool:
    """Tell whether larger values of a metric are better, also if it is of held-out images."""
    return metric.removesuffix("_held_out") in HIGHER_IS_BETTER


def best_point(points: Points, metric: str) -> tuple[int, float]:
    """Return the first point with the best value of the metric."""
    best = max if higher_is_better(metric) else min
    return best(points, key=lambda point: point[1])


def passes(points: Points, baseline: Points, metric: str) -> int | None:
    """Return the images seen when a curve is first better than the best of `baseline`, or None."""
    best = best_point(baseline, metric)[1]
    sign = 1 if higher_is_better(metric) else -1

    for seen, value in points:
        if sign * value > sign * best:
            return seen
    return None


# Runs side by side


def run_comparison(runs: Sequence[TrainingCurve]) -> Figure:
    """Draw one panel per metric over images seen, with a line per run, and bars of the times."""
    metrics = metrics_of(runs)
    figure = Figure(figsize=(4.2 * (len(metrics) + 1), 3.8), layout="constrained")
    *panels, bars = figure.subplots(1, len(metrics) + 1, squeeze=False)[0]

    for axes, metric in zip(panels, metrics, strict=True):
        _draw_metric(axes, runs, metric)

    _draw_times(bars, runs)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def metrics_of(runs: Sequence[TrainingCurve]) -> list[str]:
    """Return the metrics of all runs, in the order in which they first appear."""
    return list(dict.fromkeys(metric for run in runs for metric in run.distances))


def _looks(runs: Sequence[TrainingCurve]) -> list[tuple[TrainingCurve, dict[str, Any]]]:
    """Pair each run with its look, which is that of its estimator."""
    # Runs of the same method need names of their own.
    names = [f"{run.method} {number}" for number, run in enumerate(runs)]
    styles = looks(names)
    return [(run, styles[name]) for run, name in zip(runs, names, strict=True)]


def _draw_points(axes: Axes, points: Points, divisor: float, **style: Any) -> None:
    """Draw values over the images seen, in units of `divisor` images."""
    seen = [images / divisor for images, _ in points]
    values = [value for _, value in points]
    axes.plot(seen, values, **style)


def _draw_metric(axes: Axes, runs: Sequence[TrainingCurve], metric: str) -> None:
    """Draw a metric of all runs that have it."""
    every_point: list[tuple[int, float]] = []
    for run in runs:
        every_point += run.distances.get(metric, ())
    unit, divisor = image_unit(max(seen for seen, _ in every_point))

    for run, style in _looks(runs):
        _draw_points(axes, run.distances.get(metric, ()), divisor, **style)

    logarithmic = log_axis(value for _, value in every_point)
    xlabel = f"Training images seen ({unit})"
    dress(axes, logarithmic, xlabel=xlabel, ylabel=TITLES.get(metric, metric))


def _draw_times(axes: Axes, runs: Sequence[TrainingCurve]) -> None:
    """Draw a bar for each run: plain for network and data, hatched for the estimator."""
    for number, (run, style) in enumerate(_looks(runs)):
        colour = style["color"]
        estimator, rest = run.ms_per_image
        axes.barh(number, rest, height=0.6, color=colour, label=f"{run.name} {run.method}")
        # Some colours are dark and others light: only a pattern stands out from all.
        axes.barh(number, estimator, height=0.6, left=rest, edgecolor=colour, **HATCHED)

    dress(axes, xlabel="ms per image (hatched: estimator)")
    axes.set_yticks([])
    axes.invert_yaxis()


# Figure 4


def figure4(runs: Sequence[TrainingCurve]) -> Figure:
    """Draw Figure 4: a column per metric with two panels, in which k (above) and n (below) vary.

    Both panels also show the baseline, a run of the one-sample estimator, if there is one. Dotted
    lines show the best value of each curve, dashed lines the point where a curve passes the
    baseline's best.
    """
    metrics = metrics_of(runs)
    figure = Figure(figsize=(6 * len(metrics), 7), layout="constrained")
    columns = figure.subplots(2, len(metrics), sharex="col", squeeze=False).T

    for (upper, lower), metric in zip(columns, metrics, strict=True):
        measured = [run for run in runs if metric in run.distances]
        without_k = [run for run in measured if run.k is None]
        last_images = max(run.distances[metric][-1][0] for run in measured)
        unit, divisor = image_unit(last_images)

        for axes, option, title in ((upper, "k", "search size k"), (lower, "n", "sample size n")):
            dress(axes, "y", ylabel=TITLES.get(metric, metric))
            axes.set_title(f"Effect of the {title}", fontsize=10)
            _panel(axes, without_k + varied(measured, option), metric, divisor)

        lower.set_xlabel(f"Training images seen ({unit})")
    return figure


def varied(runs: Sequence[TrainingCurve], option: str) -> list[TrainingCurve]:
    """Select the runs that differ only in `option`, "k" or "n".

    All these runs have the same value of the other option: the most common one. In a tie it is the
    larger one.
    """
    searching = [run for run in runs if run.k is not None]
    other = "n" if option == "k" else "k"
    counts = Counter(getattr(run, other) for run in searching)
    common = max(counts, key=lambda value: (counts[value], value or 0), default=None)

    chosen = [run for run in searching if getattr(run, other) == common]
    return sorted(chosen, key=lambda run: getattr(run, option) or 0)


def _panel(axes: Axes, runs: Sequence[TrainingCurve], metric: str, divisor: float) -> None:
    """Draw the curves of Figure 4's panel, the best of each, and where it passes the baseline."""
    baseline = next((run for run in runs if run.estimator == "OneSample"), None)

    for run, style in _looks(runs):
        points = run.distances[metric]
        colour = style["color"]
        _draw_points(axes, points, divisor, label=run.method, **style)

        best = best_point(points, metric)[1]
        axes.axhline(best, color=colour, linestyle=":", linewidth=1)

        if baseline is None:
            continue
        passed = passes(points, baseline.distances[metric], metric)
        if passed is not None:
            axes.axvline(passed / divisor, color=colour, linestyle="--", linewidth=1)

    axes.legend(fontsize=8)
