"""The Pareto front of error against time, and the order of the entries that follows from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lit_knn.referee.page.results import Entry, Results

ROUNDING = 1e-12
"""Smaller errors count as equal: they are deviations of 1e-6 per dimension, the rounding of float32."""

Point = tuple[float, float]


def fronts(points: Sequence[Point]) -> list[int | None]:
    """Number the fronts of points (time, error): nothing beats those of front 1, only front 1 those of front 2, etc.

    A point beats another by being less in one and not more in the other. A point with a NaN has no front.
    """
    places: dict[Point, int] = {}
    for time, error in sorted({point for point in points if not any(map(math.isnan, point))}):
        # No point that comes later is faster, so the earlier ones with no more error beat this one.
        beaten_by = [place for (_, other), place in places.items() if other <= error]
        places[time, error] = 1 + max(beaten_by, default=0)
    return [places.get(point) for point in points]


@dataclass(frozen=True)
class Ranked:
    """An entry with its place in the order."""

    number: int  # 1 is the first in the order; it names the entry in pictures
    entry: Entry
    place: int | None  # the number of its overall front; None if a noise level is missing
    time: float  # mean time ratio over the noise levels
    error: float  # worst counted error ratio over the noise levels, see `overall`
    front: frozenset[float]  # the noise levels at which it is on the front


def ranked(results: Results) -> list[Ranked]:
    """Order the entries by overall front, then by time. Entries without a front come last."""
    entries, levels = results.entries, results.levels
    points = [overall(entry, results) for entry in entries]
    at_levels = {t: fronts([(e.value(t, "time_ratio"), counted(e.value(t, "mse"))) for e in entries]) for t in levels}
    places = fronts(points)
    # An entry without a front has no time to sort by.
    order = sorted(range(len(entries)), key=lambda i: (places[i] or math.inf, points[i] if places[i] else ()))
    return [
        Ranked(number, entries[i], places[i], *points[i], frozenset(t for t in levels if at_levels[t][i] == 1))
        for number, i in enumerate(order, start=1)
    ]


def overall(entry: Entry, results: Results) -> Point:
    """Return mean time ratio and worst error ratio over all noise levels; NaN if one is missing.

    A noise level where this entry and the reference estimator both have rounding errors does not count as worst.
    """
    times = [entry.value(t, "time_ratio") for t in results.levels]
    errors = {t: counted_ratio(entry, t, results) for t in results.levels}
    if any(map(math.isnan, (*times, *errors.values()))):
        return math.nan, math.nan
    counting = [t for t in errors if max(entry.value(t, "mse"), reference_mse(entry, t, results)) > ROUNDING]
    return sum(times) / len(times), max((errors[t] for t in counting), default=1.0)


def counted(mse: float) -> float:
    """Raise an error below `ROUNDING` to it."""
    return mse if math.isnan(mse) else max(mse, ROUNDING)


def counted_ratio(entry: Entry, t: float, results: Results) -> float:
    """Return the ratio of the error to the reference estimator's, both counted."""
    return counted(entry.value(t, "mse")) / counted(reference_mse(entry, t, results))


def reference_mse(entry: Entry, t: float, results: Results) -> float:
    """Return the reference estimator's error beside this entry, from the entry's error and its error ratio.

    For an entry whose error is rounding it is the median over all entries: equal entries must not be ordered by digits.
    """
    asked = [entry] if entry.value(t, "mse") > ROUNDING else results.entries
    told = [one.value(t, "mse") / (one.value(t, "mse_ratio") or math.nan) for one in asked]
    return median([value for value in told if not math.isnan(value)] or [0.0])
