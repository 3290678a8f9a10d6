"""Intervals of means over seeds, alone and together with others, and their text in tables."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

CONFIDENCE = 0.95
NOT_MEASURED = "not measured"


class Interval(NamedTuple):
    """A mean over seeds with the half-width of its t-interval at `CONFIDENCE`."""

    mean: float
    half_width: float
    seeds: int

    @property
    def sign(self) -> int:
        """−1 or 1 if the interval excludes 0, or 0: then the data do not tell the sign."""
        return int(np.sign(self.mean)) if abs(self.mean) > self.half_width else 0

    def __str__(self) -> str:
        """Return the interval as text, bold if it excludes 0."""
        if self.seeds == 0:
            return NOT_MEASURED
        if math.isinf(self.half_width):
            return f"{self.mean:+.3g} (one seed)"
        text = f"{self.mean:+.3g} ± {self.half_width:.2g}"
        return f"**{text}**" if self.sign else text


class Difference(NamedTuple):
    """A difference with the interval that holds alone, and with the one that holds together with others."""

    alone: Interval
    together: Interval

    def cell(self, seeds: int) -> str:
        """Return the text of a table's cell, whose row has this number of seeds."""
        mark = "†" if self.together.sign else ""
        known = self.alone.seeds
        of_some = f" ({known} of {seeds})" if 1 < known < seeds else ""
        return f"{self.alone}{mark}{of_some}"


def interval(differences: Sequence[float], comparisons: int = 1) -> Interval:
    """Return the t-interval of the mean of independent numbers; one number has an infinite interval.

    Args:
        differences: the numbers; NaN is left out.
        comparisons: number of intervals from which this one was chosen by its data. By Bonferroni's rule all of them
            together hold the true means at `CONFIDENCE`.
    """
    values = np.array([value for value in differences if not math.isnan(value)])
    if len(values) < 2:
        return Interval(float(values.mean()) if len(values) else math.nan, math.inf, len(values))
    quantile = student.isf((1 - CONFIDENCE) / 2 / comparisons, len(values) - 1)
    return Interval(
        float(values.mean()),
        float(quantile * values.std(ddof=1) / math.sqrt(len(values))),
        len(values),
    )
