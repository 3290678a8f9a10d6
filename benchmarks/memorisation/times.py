"""Reads times off the curves of the runs: when copies begin, when samples are good, and how times grow with N."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import linregress
from scipy.stats import t as student

from benchmarks.learning_curves.statistics import CONFIDENCE
from benchmarks.memorisation.runs import Run
from lit_knn.results import Row

COPIED_LEVELS = (0.05, 0.2)
# A distance within this share of a run's least counts as good.
SLACK = 0.1


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


def generation_time(rows: Sequence[Row]) -> float:
    """Return tau_gen: the step at which `fd_pixels` on held-out digits comes within `SLACK` of the run's least."""
    distances = _column(rows, "fd_pixels")
    return crossing(_column(rows, "step"), [-value for value in distances], -(1 + SLACK) * min(distances))


def growth(runs: Mapping[Run, Sequence[Row]], time: Callable[[Sequence[Row]], float]) -> Slope | None:
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


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows]
