"""The Pareto front of error against time, and the order of the entries that follows from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lit_knn.referee.page.results import Entry, Results

ROUNDING = 1e-12
"""Errors below it count as equal: they are deviations of 1e-6 per dimension, the rounding of float32."""

Point = tuple[float, float]


def pareto_front(points: Sequence[Point]) -> list[bool]:
    """Tell which points (time, error) no other point beats.

    A point beats another if it is less in one coordinate and not more in the other, so equal points are all on the
    front, or none. A point with a NaN is never on it.
    """
    known = [(point, number) for number, point in enumerate(points) if not any(map(math.isnan, point))]
    on_front = [False] * len(points)
    best = (math.inf, math.inf)
    for point, number in sorted(known):
        if point[1] < best[1] or point == best:
            best = point
            on_front[number] = True
    return on_front


@dataclass(frozen=True)
class Ranked:
    """An entry with its place in the order.

    Attributes:
        number: 1 is the first in the order; it names the entry in pictures.
        place: 1 is on the overall front, 2 on the front of the rest, and so on; None if a noise level is missing.
        time: mean time ratio over the noise levels.
        error: worst counted error ratio over the noise levels, see `overall`.
        front: the noise levels at which it is on the front.
    """

    number: int
    entry: Entry
    place: int | None
    time: float
    error: float
    front: frozenset[float]


def ranked(results: Results) -> list[Ranked]:
    """Order the entries by place, then time. Entries without a place come last."""
    entries, levels = results.entries, results.levels
    points = [overall(entry, results) for entry in entries]
    front = {t: pareto_front([(e.value(t, "time_ratio"), counted(e.value(t, "mse"))) for e in entries]) for t in levels}
    places = _places(points)
    # Without a place there is no time to sort by.
    order = sorted(range(len(entries)), key=lambda i: (places[i] or math.inf, points[i] if places[i] else ()))
    return [
        Ranked(number, entries[i], places[i], *points[i], frozenset(t for t in levels if front[t][i]))
        for number, i in enumerate(order, start=1)
    ]


def overall(entry: Entry, results: Results) -> Point:
    """Return mean time ratio and worst error ratio over all noise levels; NaN if one is missing.

    The worst ratio leaves out noise levels at which this entry and the reference estimator both have rounding errors.
    """
    times = [entry.value(t, "time_ratio") for t in results.levels]
    errors = [counted_ratio(entry, t, results) for t in results.levels]
    if any(map(math.isnan, times + errors)):
        return math.nan, math.nan
    counting = [max(entry.value(t, "mse"), reference_mse(entry, t, results)) > ROUNDING for t in results.levels]
    worst = max((error for error, counts in zip(errors, counting, strict=True) if counts), default=1.0)
    return sum(times) / len(times), worst


def counted(mse: float) -> float:
    """Raise an error below `ROUNDING` to it."""
    return mse if math.isnan(mse) else max(mse, ROUNDING)


def counted_ratio(entry: Entry, t: float, results: Results) -> float:
    """Return the ratio of the error to the reference estimator's, both counted."""
    return counted(entry.value(t, "mse")) / counted(reference_mse(entry, t, results))


def reference_mse(entry: Entry, t: float, results: Results) -> float:
    """Return the reference estimator's error beside this entry, from the entry's error and ratio.

    A ratio of 0 gives none. Then it is the median over the other entries, or 0 if these give none either. It is also
    the median where the error is rounding, so that the last digits of the ratio do not order entries that count as
    equal.
    """

    def given_by(one: Entry) -> float:
        share = one.value(t, "mse_ratio")
        return one.value(t, "mse") / share if share > 0 else math.nan

    if entry.value(t, "mse") > ROUNDING and not math.isnan(own := given_by(entry)):
        return own
    known = [value for one in results.entries if not math.isnan(value := given_by(one))]
    return median(known) if known else 0.0


def _places(points: Sequence[Point]) -> list[int | None]:
    """Number the fronts: the first is that of all points, the next that of those not on the first, and so on."""
    places: list[int | None] = [None] * len(points)
    rest = [i for i, point in enumerate(points) if not any(map(math.isnan, point))]
    place = 1
    while rest:
        for i, on_front in zip(list(rest), pareto_front([points[i] for i in rest]), strict=True):
            if on_front:
                places[i] = place
                rest.remove(i)
        place += 1
    return places
