"""Picture of several training runs: their distances to the data, and the time per image."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.common.tables import TITLES
from lit_knn.figures.style import dress, image_unit, log_values, look

DOUBLES = "the steps N(k) double"


class ComparedRun(NamedTuple):
    """One run of the picture.

    Attributes:
        name: as in the legend.
        ms_per_image: (estimator, rest): milliseconds of training per image.
        distances: (images seen, value) in ascending order, by metric.
        doublings: images seen where the number of discretisation steps N(k) doubled.
    """

    name: str
    ms_per_image: tuple[float, float]
    distances: Mapping[str, Sequence[tuple[int, float]]]
    doublings: Sequence[float] = ()


def run_comparison(runs: Sequence[ComparedRun]) -> Figure:
    """Draw one panel per metric over images seen, with a line per run, and bars of the time per image.

    A thin vertical line shows where N(k) doubles in consistency training: the loss and the samples change there.
    """
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.distances))
    figure = Figure(figsize=(4.2 * (len(metrics) + 1), 3.8), layout="constrained")
    *panels, bars = figure.subplots(1, len(metrics) + 1, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_metric(axes, runs, metric)
    _draw_times(bars, runs)
    handles, labels = bars.get_legend_handles_labels()
    marked = [line for axes in panels for line in axes.lines if line.get_label() == DOUBLES]
    legend = [*handles, *marked[:1]], [*labels, *([DOUBLES] if marked else [])]
    figure.legend(*legend, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_metric(axes: Axes, runs: Sequence[ComparedRun], metric: str) -> None:
    points = [point for run in runs for point in run.distances.get(metric, ())]
    unit, divisor = image_unit(max(seen for seen, _ in points))
    for number, run in enumerate(runs):
        own = run.distances.get(metric, ())
        axes.plot([seen / divisor for seen, _ in own], [value for _, value in own], **look(number))
    for seen in sorted({seen for run in runs for seen in run.doublings if seen <= max(seen for seen, _ in points)}):
        axes.axvline(seen / divisor, color="0.6", linewidth=0.6, linestyle=":", zorder=0, label=DOUBLES)
    dress(axes, xlabel=f"Training images seen ({unit})", ylabel=TITLES.get(metric, metric))
    if min(value for _, value in points) > 0:
        log_values(axes)


def _draw_times(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    for number, run in enumerate(runs):
        estimator, rest = run.ms_per_image
        axes.barh(number, rest, height=0.6, color=look(number)["color"], label=run.name)
        axes.barh(number, estimator, height=0.6, left=rest, color="0.3")
    dress(axes, xlabel="ms per image (dark: estimator)")
    axes.set_yticks([])
    axes.invert_yaxis()
