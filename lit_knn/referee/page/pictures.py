"""The pictures of a page: error against time at each noise level, and the error ratio of each entry over t."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from lit_knn.figures.style import COLOURS, dress, look
from lit_knn.referee.page import numbers
from lit_knn.referee.page.front import ROUNDING, Ranked, counted, counted_ratio, pareto_front, reference_mse
from lit_knn.referee.page.labels import label_points
from lit_knn.referee.page.results import Results

WIDTH = 10.0
COLUMNS = 3
SPOTLIGHT_COLUMNS = 4
ORIGINS = {"lit_knn": "lit_knn", "own file": "own file", "adapter": "others' code, by an adapter"}
# Curves leave the panels above this ratio. Otherwise the worst entry would press the others together.
HIGHEST_RATIO = 1e4
FRONT_COLOUR = "#8c8c8c"
# A point of a picture: number, time, its range, error, its standard error, origin.
Point = tuple[int, float, tuple[float, float], float, float, str]


def error_against_time(results: Results, entries: Sequence[Ranked]) -> Figure:
    """Draw a panel over all noise levels and one for each, with error bars and the Pareto front as steps."""
    levels = results.levels
    rows = math.ceil((len(levels) + 1) / COLUMNS)
    legend_rows = math.ceil(len(entries) / COLUMNS)
    figure = Figure(figsize=(WIDTH, 2.75 * rows + 0.17 * legend_rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    first, *rest = panels
    overall = _overall_points(results, entries)
    _draw_panel(first, overall, "all noise levels", "worst error, of the reference's")
    at_levels = [_points(entries, t) for t in levels]
    for axes, t, points in zip(rest, levels, at_levels, strict=False):
        _draw_panel(axes, points, f"t = {numbers.level(t)}", "mean squared error")
    for axes in rest[len(levels) :]:
        axes.set_visible(False)
    used = [first, *rest[: len(levels)]]
    _same_limits(used, [overall, *at_levels])
    _legends(figure, entries)
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    for axes, points in zip(used, [overall, *at_levels], strict=True):
        label_points(axes, [(time, error, str(number), _colour(kind)) for number, time, _, error, _, kind in points])
    return figure


def ratio_over_t(results: Results, entries: Sequence[Ranked]) -> Figure:
    """Draw a panel for each entry: its error ratio over t with a band of one standard error, the others in grey."""
    rows = math.ceil(len(entries) / SPOTLIGHT_COLUMNS)
    figure = Figure(figsize=(WIDTH, 1.95 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, SPOTLIGHT_COLUMNS, squeeze=False, sharex=True, sharey=True)
    curves = [_curve(results, ranked) for ranked in entries]
    # One line with gaps is far quicker to draw than one for each entry.
    others = [[value for curve in curves for value in (*curve[part], math.nan)] for part in (0, 1)]
    for axes, ranked, own in zip(panels.flat, entries, curves, strict=False):
        axes.plot(*others, color="0.87", linewidth=0.7, zorder=1)
        t, share, low, high = own
        style = look(list(ORIGINS).index(_kind(ranked)))
        axes.fill_between(t, low, high, color=style["color"], alpha=0.25, linewidth=0, zorder=2)
        axes.plot(t, share, **style, zorder=3)
        dress(axes, log="xy")
        axes.axhline(1, color="0.4", linewidth=0.7, linestyle=":", zorder=1)
        axes.set_title(_shortened(f"{ranked.number}  {ranked.entry.name}"), fontsize=8, loc="left")
        axes.xaxis.set_major_locator(FixedLocator(_spread_levels(results.levels)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.level(value)))
        axes.tick_params(labelsize=7)
        axes.minorticks_off()
    for axes in panels.flat[len(entries) :]:
        axes.set_visible(False)
    bottom, top = panels.flat[0].get_ylim()
    panels.flat[0].set_ylim(bottom, min(top, HIGHEST_RATIO))
    figure.supxlabel("noise level t", fontsize=9)
    figure.supylabel("mean squared error, of the reference's", fontsize=9)
    return figure


def _points(entries: Sequence[Ranked], t: float) -> list[Point]:
    """List the points at one noise level, without entries whose time or error is unknown."""
    points = []
    for ranked in entries:
        time, mse, standard_error = (ranked.entry.value(t, name) for name in ("time_ratio", "mse", "mse_se"))
        if time > 0 and not math.isnan(mse):
            spread = (ranked.entry.value(t, "time_ratio_low"), ranked.entry.value(t, "time_ratio_high"))
            points.append((ranked.number, time, spread, counted(mse), standard_error, _kind(ranked)))
    return points


def _overall_points(results: Results, entries: Sequence[Ranked]) -> list[Point]:
    """List mean time and worst error ratio, with the standard error of the ratio at the noise level of the worst."""
    points = []
    for ranked in entries:
        entry = ranked.entry
        if ranked.time > 0 and not math.isnan(ranked.error):
            worst = min(results.levels, key=lambda t: abs(counted_ratio(entry, t, results) - ranked.error))
            spread = (entry.mean("time_ratio_low"), entry.mean("time_ratio_high"))
            standard_error = entry.value(worst, "mse_se") / counted(reference_mse(entry, worst, results))
            points.append((ranked.number, ranked.time, spread, ranked.error, standard_error, _kind(ranked)))
    return points


def _draw_panel(axes: Axes, points: Sequence[Point], title: str, ylabel: str) -> None:
    dress(axes, log="xy", xlabel="time, of the reference's", ylabel=ylabel)
    axes.set_title(title, fontsize=10)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    axes.tick_params(labelsize=7.5)
    axes.minorticks_off()
    # The limits are set later. Before that, a single point would make them equal.
    axes.autoscale(False)
    for _, time, (low, high), error, standard_error, kind in points:
        axes.errorbar(
            time,
            error,
            xerr=[[_reach(time - low)], [_reach(high - time)]],
            # On a logarithmic axis a bar that reaches 0 would have no end. It is cut at a tenth of the mean.
            yerr=[[min(_reach(standard_error), 0.9 * error)], [_reach(standard_error)]],
            color=_colour(kind),
            marker=look(list(ORIGINS).index(kind))["marker"],
            markersize=3.2,
            elinewidth=0.8,
            linestyle="none",
            zorder=3,
        )


def _reach(length: float) -> float:
    """Return the length of an error bar; nothing if it is unknown."""
    return 0.0 if math.isnan(length) else max(0.0, length)


def _same_limits(panels: Sequence[Axes], points: Sequence[Sequence[Point]]) -> None:
    """Give all panels the same times, and all but the first the same errors. Then draw the fronts up to the edges."""
    times = [bound for own in points for point in own for bound in (point[1], *point[2]) if bound > 0]
    errors = [point[3] for own in points[1:] for point in own]
    for number, (axes, own) in enumerate(zip(panels, points, strict=True)):
        if times:
            axes.set_xlim(min(times) / 1.8, max(times) * 1.8)
        shown = errors if number else [point[3] for point in own]
        if shown:
            axes.set_ylim(min(shown) / 8, max(shown) * 8)
        _draw_front(axes, own)


def _draw_front(axes: Axes, points: Sequence[Point]) -> None:
    corners = [(point[1], point[3]) for point in points]
    front = sorted(corner for corner, on in zip(corners, pareto_front(corners), strict=True) if on)
    if front:
        # From the top above the fastest entry to the right of the most accurate one.
        x = [front[0][0], *(time for time, _ in front), axes.get_xlim()[1]]
        y = [axes.get_ylim()[1], *(error for _, error in front), front[-1][1]]
        axes.step(x, y, where="post", color=FRONT_COLOUR, linewidth=1, zorder=2, label="Pareto front")


def _legends(figure: Figure, entries: Sequence[Ranked]) -> None:
    """Name the numbers, and the origins by colour and marker."""
    kinds = [kind for kind in ORIGINS if any(_kind(ranked) == kind for ranked in entries)]
    names = [
        Line2D(
            [],
            [],
            linestyle="none",
            label=_shortened(f"{ranked.number}  {ranked.entry.name}", 48),
            color=_colour(_kind(ranked)),
        )
        for ranked in entries
    ]
    origins = [
        Line2D([], [], **look(list(ORIGINS).index(kind)) | {"linestyle": "none"}, label=ORIGINS[kind]) for kind in kinds
    ]
    origins.append(Line2D([], [], color=FRONT_COLOUR, label="Pareto front"))
    if any(
        entry.value(t, "mse") < ROUNDING
        for ranked in entries
        for t, entry in ((t, ranked.entry) for t in ranked.entry.rows)
    ):
        origins.append(Line2D([], [], linestyle="none", label=f"errors below {ROUNDING:g} are drawn at {ROUNDING:g}"))
    common = {"frameon": False, "fontsize": 8}
    figure.legend(handles=origins, loc="outside upper center", ncols=len(origins), **common)
    figure.legend(
        handles=names,
        loc="outside lower center",
        ncols=COLUMNS,
        labelcolor="linecolor",
        handlelength=0,
        handletextpad=0,
        **common,
    )


def _curve(results: Results, ranked: Ranked) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return t, the counted error ratio, and the ends of its band."""
    rows = []
    for t in results.levels:
        share = counted_ratio(ranked.entry, t, results)
        if math.isnan(share):
            continue
        reach = _reach(ranked.entry.value(t, "mse_ratio_se"))
        rows.append((t, share, max(share - reach, 0.1 * share), share + reach))
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], [row[3] for row in rows]


def _spread_levels(levels: Sequence[float]) -> list[float]:
    """Leave out levels whose numbers would meet on a logarithmic axis."""
    if len(levels) < 2:
        return list(levels)
    room = (math.log(levels[-1]) - math.log(levels[0])) / 7
    kept: list[float] = []
    for t in levels:
        if not kept or math.log(t / kept[-1]) >= room:
            kept.append(t)
    return kept


def _kind(ranked: Ranked) -> str:
    origin = ranked.entry.facts["origin"]
    return origin if origin in ORIGINS else "own file"


def _colour(kind: str) -> str:
    return COLOURS[list(ORIGINS).index(kind)]


def _shortened(text: str, length: int = 36) -> str:
    # A dollar sign would start a formula.
    text = " ".join(text.split()).replace("$", r"\$")
    return text if len(text) <= length else f"{text[: length - 1]}…"
