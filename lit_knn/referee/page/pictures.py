"""The picture of a page: error against time, over all noise levels and at each."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_knn.figures.style import dress, looks
from lit_knn.referee.page.front import ROUNDING, Ranked, counted, counted_ratio, fronts, reference_mse
from lit_knn.referee.page.results import Results

WIDTH, COLUMNS = 10.0, 3
# The text and the edge of the markers by origin; colour and shape are those of the estimator.
ORIGINS = {"lit_knn": ("lit_knn", "none"), "own file": ("own file", "0.5"), "adapter": ("others' code", "black")}
FRONT_COLOUR = "#8c8c8c"
# Points above or below their entry where its number stands: entries of about the same time take turns.
HEIGHTS = (3, -8)
SIZES: dict[str, Any] = {"markersize": 4.5, "markeredgewidth": 0.7}
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8}


class Point(NamedTuple):
    """An entry in a panel."""

    number: int
    time: float
    low: float
    high: float
    error: float
    standard_error: float


def error_against_time(results: Results, entries: Sequence[Ranked]) -> Figure:
    """Draw a panel over all noise levels and one for each, with error bars and the Pareto front as steps."""
    styles, overall = _styles(entries), _points(results, entries)
    at_levels = {f"t = {t:g}": _points(results, entries, t) for t in results.levels}
    panels = {"all noise levels": overall} | at_levels
    times = _limits((time for own in panels.values() for p in own for time in (p.time, p.low, p.high)), 1.8)
    errors = _limits((p.error for own in at_levels.values() for p in own), 8)
    rows, legend_rows = math.ceil(len(panels) / COLUMNS), math.ceil(len(entries) / COLUMNS)
    figure = Figure(figsize=(WIDTH, 2.75 * rows + 0.17 * legend_rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for axes, (title, points) in zip(grid, panels.items(), strict=False):
        first = points is overall
        dress(axes, "xy", xlim=times, ylim=_limits((p.error for p in points), 8) if first else errors)
        axes.set_xlabel("time, of the reference's", fontsize=8)
        axes.set_ylabel("worst error, of the reference's" if first else "mean squared error", fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=7.5)
        axes.minorticks_off()
        _draw_front(axes, points)
        for place, point in enumerate(sorted(points, key=lambda point: point.time)):
            _draw_point(axes, point, styles[point.number], HEIGHTS[place % len(HEIGHTS)])
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    _legends(figure, entries, styles)
    return figure


def _points(results: Results, entries: Sequence[Ranked], t: float | None = None) -> list[Point]:
    """List the points at a noise level, or over all of them, without entries whose time or error is unknown."""
    points = []
    for ranked in entries:
        entry, error = ranked.entry, ranked.error
        if t is None:
            # The standard error is that of the ratio at the noise level of the worst one.
            worst = min(results.levels, key=lambda t: abs(counted_ratio(entry, t, results) - error))
            reference = reference_mse(entry, worst, results)
            standard_error = entry.value(worst, "mse_se") / counted(reference)
            if min(entry.value(worst, "mse"), reference) > ROUNDING:  # It is the plain ratio, that of paired latents.
                standard_error = entry.value(worst, "mse_ratio_se")
            times = (ranked.time, entry.mean("time_ratio_low"), entry.mean("time_ratio_high"))
        else:
            error, standard_error = counted(entry.value(t, "mse")), entry.value(t, "mse_se")
            times = (entry.value(t, "time_ratio"), entry.value(t, "time_ratio_low"), entry.value(t, "time_ratio_high"))
        points.append(Point(ranked.number, *times, error, standard_error))
    return [point for point in points if point.time > 0 and not math.isnan(point.error)]


def _limits(values: Iterable[float], room: float) -> tuple[float | None, float | None]:
    """Return the limits of an axis that shows these values, with a factor of `room` at both ends."""
    shown = [value for value in values if value > 0]
    return (min(shown) / room, max(shown) * room) if shown else (None, None)


def _draw_point(axes: Axes, point: Point, style: dict[str, Any], height: float) -> None:
    """Draw an entry with its error bars, and its number at this height."""
    # `max` with 0 first also turns an unknown length into 0.
    left, right = max(0.0, point.time - point.low), max(0.0, point.high - point.time)
    up = max(0.0, point.standard_error)
    # On a logarithmic axis a bar that reaches 0 would have no end. It is cut at a tenth of the mean.
    bars: dict[str, Any] = {"xerr": [[left], [right]], "yerr": [[min(up, 0.9 * point.error)], [up]]}
    axes.errorbar(point.time, point.error, **bars, **style | {"linestyle": "none"}, elinewidth=0.8)
    at: dict[str, Any] = {"xytext": (2, height), "textcoords": "offset points"}
    axes.annotate(f"{point.number}", (point.time, point.error), **at, fontsize=6.5, color="0.2")


def _draw_front(axes: Axes, points: Sequence[Point]) -> None:
    corners = [(point.time, point.error) for point in points]
    front = sorted(corner for corner, place in zip(corners, fronts(corners), strict=True) if place == 1)
    if front:
        # From the top above the fastest entry to the right of the most accurate one.
        x = [front[0][0], *(time for time, _ in front), axes.get_xlim()[1]]
        y = [axes.get_ylim()[1], *(error for _, error in front), front[-1][1]]
        axes.step(x, y, where="post", color=FRONT_COLOUR, linewidth=1, zorder=2, label="Pareto front")


def _legends(figure: Figure, entries: Sequence[Ranked], styles: Mapping[int, dict[str, Any]]) -> None:
    """Name the numbers, and the origins by the edge of the markers."""

    def line(label: str, **style: Any) -> Line2D:
        return Line2D([], [], label=label, **{"linestyle": "none"} | style)

    used = dict(map(_origin, entries))
    origins = [line(name, color="0.8", marker="o", **SIZES, markeredgecolor=edge) for name, edge in used.items()]
    origins.append(line("Pareto front", color=FRONT_COLOUR, linestyle="-"))
    if any(mse < ROUNDING for ranked in entries for mse in ranked.entry.values("mse")):
        origins.append(line(f"errors below {ROUNDING:g} are drawn at {ROUNDING:g}"))
    figure.legend(handles=origins, loc="outside upper center", ncols=len(origins), **LEGEND)
    labels = [f"{each.number} {each.entry.name}".replace("$", r"\$") for each in entries]  # $ would start a formula.
    labels = [textwrap.shorten(label, 48, placeholder="…") for label in labels]
    looked = [styles[each.number] | {"linestyle": "none"} for each in entries]
    names = [line(label, **look) for label, look in zip(labels, looked, strict=True)]
    figure.legend(handles=names, loc="outside lower center", ncols=COLUMNS, handlelength=1, **LEGEND)


def _origin(ranked: Ranked) -> tuple[str, str]:
    return ORIGINS.get(ranked.entry.facts["origin"], ORIGINS["own file"])


def _styles(entries: Sequence[Ranked]) -> dict[int, dict[str, Any]]:
    """Return the look of each entry, by its number."""
    own_first = sorted(entries, key=lambda ranked: _origin(ranked) != ORIGINS["lit_knn"])
    styles = looks(each.entry.name for each in own_first)
    return {each.number: styles[each.entry.name] | SIZES | {"markeredgecolor": _origin(each)[1]} for each in entries}
