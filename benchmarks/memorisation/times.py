"""Reads times off the curves of the runs: when copies begin, when a network is good, and how times grow with N."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.stats import linregress
from scipy.stats import t as student

from benchmarks.learning_curves.statistics import CONFIDENCE, Interval, interval
from benchmarks.memorisation.runs import Run
from lit_knn.common.tables import Row

COPIED_LEVELS = (0.05, 0.2)
# A value within this share of a run's least counts as good.
SLACK = 0.1
Time = Callable[[Sequence[Row]], float]
"""Reads a time off the rows of a run; NaN if the run has not come so far."""


class Slope(NamedTuple):
    """An exponent with the half-width of its t-interval at `CONFIDENCE`.

    Attributes:
        exponent: slope of ln(time) over ln(N).
        half_width: infinite for two points.
        factor: the line is factor·N^exponent.
        points: number of runs.
    """

    exponent: float
    half_width: float
    factor: float
    points: int


def crossing(steps: Sequence[float], values: Sequence[float], level: float) -> float:
    """Return the first step at which values reach a level, NaN if they never do.

    Between two measurements the value is linear in the logarithm of the step. If the first value is at the level
    already, the result is the first step, an upper bound.
    """
    reached = np.flatnonzero(np.asarray(values) >= level)
    if not len(reached):
        return math.nan
    first = int(reached[0])
    if first == 0:
        return float(steps[0])
    low, high = values[first - 1], values[first]
    share = (level - low) / (high - low)
    return float(steps[first - 1] * (steps[first] / steps[first - 1]) ** share)


def memorisation_time(rows: Sequence[Row], level: float) -> float:
    """Return tau_mem: the step at which the copied fraction reaches `level`, NaN if it does not yet."""
    return crossing(_column(rows, "step"), _column(rows, "copied_fraction"), level)


def generation_time(rows: Sequence[Row], name: str) -> float:
    """Return tau_gen: the step at which a column comes within `SLACK` of its least value in the run.

    The least value is known, and the result is not NaN, when the network has begun to overfit.
    """
    if math.isnan(overfitting_time(rows)):
        return math.nan
    values = _column(rows, name)
    return crossing(_column(rows, "step"), [-value for value in values], -(1 + SLACK) * min(values))


def overfitting_time(rows: Sequence[Row]) -> float:
    """Return the step at which the held-out error is `SLACK` above its least value again, NaN if it is not yet."""
    steps, errors = _column(rows, "step"), _column(rows, "held_error")
    least = int(np.argmin(errors))
    return crossing(steps[least:], errors[least:], (1 + SLACK) * errors[least])


TIMES: dict[str, Time] = {
    **{f"tau_mem ({level:.0%})": partial(memorisation_time, level=level) for level in COPIED_LEVELS},
    "tau_over (held-out error)": overfitting_time,
    "tau_gen (fd_pixels)": partial(generation_time, name="fd_pixels"),
    "tau_gen (held-out error)": partial(generation_time, name="held_error"),
}


def growth(runs: Mapping[Run, Sequence[Row]], time: Time) -> Slope | None:
    """Fit time = factor·N^exponent by least squares in logarithms; None for fewer than two N.

    A run that has not reached its time would bend the line if only its faster fellows of the same N counted. So all
    runs of that N are left out.
    """
    times = {run: time(rows) for run, rows in runs.items()}
    censored = {run.N for run, value in times.items() if math.isnan(value)}
    known = [(run.N, value) for run, value in times.items() if run.N not in censored]
    if len({N for N, _ in known}) < 2:
        return None
    fit = linregress(*np.log(np.array(known, float)).T)
    freedom = len(known) - 2
    half = student.isf((1 - CONFIDENCE) / 2, freedom) * fit.stderr if freedom else math.inf
    return Slope(float(fit.slope), float(half), math.exp(fit.intercept), len(known))


def ratio(runs: Mapping[Run, Sequence[Row]], time: Time, one: str, other: str) -> Interval:
    """Return ln(time of one / time of the other estimator), the mean over pairs of runs with the same N and seed."""
    both = ((run, run._replace(estimator=other)) for run in runs if run.estimator == one)
    pairs = [(time(runs[run]), time(runs[partner])) for run, partner in both if partner in runs]
    return interval([math.log(a / b) for a, b in pairs])


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows]
