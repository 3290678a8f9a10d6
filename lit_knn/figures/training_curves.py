"""Training runs side by side: metrics over the images seen, and times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.common.tables import HELD_OUT, TITLES
from lit_knn.figures.style import Look, dress, image_unit, log_axis, looks

HIGHER_IS_BETTER = {"inception_score", "precision", "recall", "density", "coverage"}

Points = Sequence[tuple[int, float]]  # (images seen, value), ascending


@dataclass(frozen=True)
class TrainingCurve:
    """What the pictures show of one run."""

    name: str
    estimator: str  # class name
    k: int | None = None  # neighbours searched
    n: int | None = None  # samples drawn
    distances: Mapping[str, Points] = field(default_factory=dict)  # by metric
    # Milliseconds that training takes for an image: in the estimator, and in all the rest.
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
    """Return whether larger values of a metric are better; the metric may be that of held-out images."""
    return metric.removesuffix(HELD_OUT) in HIGHER_IS_BETTER


def best_point(points: Points, metric: str) -> tuple[int, float]:
    """Return the first point with the best value of the metric."""
    best = max if higher_is_better(metric) else min
    return best(points, key=lambda point: point[1])


def run_comparison(runs: Sequence[TrainingCurve]) -> Figure:
    """Draw one panel per metric over images seen, with a line per run, and bars of the times."""
    metrics = metrics_of(runs)
    columns = len(metrics) + 1
    figure = Figure(figsize=(4.2 * columns, 3.8), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]

    for axes, metric in zip(panels[:-1], metrics, strict=True):
        _draw_metric(axes, runs, metric)

    bars = panels[-1]
    _draw_times(bars, runs)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def metrics_of(runs: Sequence[TrainingCurve]) -> list[str]:
    """Return the metrics of all runs, in the order in which they first appear."""
    metrics: list[str] = []
    for run in runs:
        for metric in run.distances:
            if metric not in metrics:
                metrics.append(metric)
    return metrics


def looks_of(runs: Sequence[TrainingCurve]) -> list[Look]:
    """Return the look of each run, which is that of its estimator."""
    # Runs of the same method need names of their own.
    names = [f"{run.method} {number}" for number, run in enumerate(runs)]
    by_name = looks(names)
    return [by_name[name] for name in names]


def draw_points(axes: Axes, points: Points, divisor: float, look: Look, label: str = "") -> None:
    """Draw values over the images seen.

    Args:
        axes: the panel.
        points: images seen and values.
        divisor: number of images in a unit of the axis.
        look: look of the run.
        label: name of the run in the legend; "" leaves it out.
    """
    seen = [images / divisor for images, _ in points]
    values = [value for _, value in points]
    axes.plot(seen, values, label=label, **look)


def _draw_metric(axes: Axes, runs: Sequence[TrainingCurve], metric: str) -> None:
    """Draw a metric of all runs that have it."""
    every_point: list[tuple[int, float]] = []
    for run in runs:
        every_point += run.distances.get(metric, ())
    unit, divisor = image_unit(max(seen for seen, _ in every_point))

    for run, look in zip(runs, looks_of(runs), strict=True):
        draw_points(axes, run.distances.get(metric, ()), divisor, look)

    logarithmic = log_axis(value for _, value in every_point)
    xlabel = f"Training images seen ({unit})"
    dress(axes, logarithmic, xlabel=xlabel, ylabel=TITLES.get(metric, metric))


def _draw_times(axes: Axes, runs: Sequence[TrainingCurve]) -> None:
    """Draw a bar for each run, whose plain part is the network and the data, and whose hatched part the estimator."""
    for place, (run, look) in enumerate(zip(runs, looks_of(runs), strict=True)):
        colour = look["color"]
        estimator, rest = run.ms_per_image
        axes.barh(place, rest, height=0.6, color=colour, label=f"{run.name} {run.method}")
        # Some colours are dark and others light: only a pattern stands out from all.
        (bar,) = axes.barh(place, estimator, height=0.6, left=rest)
        bar.set(edgecolor=colour, facecolor="white", hatch="////")

    dress(axes, xlabel="ms per image (hatched: estimator)")
    axes.set_yticks([])
    axes.invert_yaxis()
