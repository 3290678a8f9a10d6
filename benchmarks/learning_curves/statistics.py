"""Summaries of the rows over seeds: means, paired differences with t-intervals, and images needed to reach a value."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.learning_curves.intervals import NOT_MEASURED, Difference, Interval, interval
from lit_knn.common.tables import Row

Value = Callable[[str, int], float]
"""A number of a run, by its estimator and seed."""


class Curves:
    """The rows of one module on one set.

    Attributes:
        estimators: their names, in order; names that the order lacks come last.
        steps: the steps at which all runs were measured. A run that was killed while it was measured can lack one.
    """

    def __init__(self, rows: Sequence[Row], estimators: Sequence[str]) -> None:
        self._rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: row["step"]):
            self._rows.setdefault((str(row["estimator"]), int(row["seed"])), []).append(
                derived(row)
            )
        in_rows = dict.fromkeys(name for name, _ in self._rows)
        self.estimators = [
            name for name in dict.fromkeys([*estimators, *in_rows]) if name in in_rows
        ]
        self.steps = set.intersection(
            *({row["step"] for row in run} for run in self._rows.values())
        )

    def measured(self, name: str) -> bool:
        """Tell whether a column has any numbers. Rows of earlier code can lack some."""
        return any(not math.isnan(row[name]) for rows in self._rows.values() for row in rows)

    @property
    def quality(self) -> str:
        """The column that says how good samples are: the Fréchet distance on features, or else on pixels."""
        return "fd_features" if self.measured("fd_features") else "fd_pixels"

    def seeds(self, *estimators: str) -> list[int]:
        """Return the seeds that all these estimators have."""
        seeds = [{seed for name, seed in self._rows if name == each} for each in estimators]
        return sorted(set.intersection(*seeds))

    def column(self, estimator: str, seed: int, name: str) -> np.ndarray:
        """Return a column of one run over its steps."""
        return np.array([row[name] for row in self._rows[estimator, seed]], float)

    def course(self, estimator: str, seed: int, name: str) -> np.ndarray:
        """Return a column of one run at the steps of all."""
        return np.array(
            [row[name] for row in self._rows[estimator, seed] if row["step"] in self.steps], float
        )

    def band(self, estimator: str, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return images seen, and mean and standard deviation over seeds (NaN for one) of a column."""
        runs = np.stack([self.course(estimator, seed, name) for seed in self.seeds(estimator)])
        spread = runs.std(0, ddof=1) if len(runs) > 1 else np.full(runs.shape[1], np.nan)
        return self.course(estimator, self.seeds(estimator)[0], "images"), runs.mean(0), spread

    def last(self, name: str) -> Value:
        """Return a function of (estimator, seed): the column at the last step of all."""
        return lambda estimator, seed: float(self.course(estimator, seed, name)[-1])

    def at_step(self, name: str, step: int) -> Value:
        """Return a function of (estimator, seed): the column at a step."""

        def value(estimator: str, seed: int) -> float:
            steps = self.column(estimator, seed, "step")
            return float(self.column(estimator, seed, name)[steps == step][0])

        return value

    def spread(self, estimator: str, value: Value, missing: str = NOT_MEASURED) -> str:
        """Return mean ± standard deviation over the seeds of an estimator as text; `missing` if no seed has a value."""
        values = np.array([value(estimator, seed) for seed in self.seeds(estimator)])
        known = values[~np.isnan(values)]
        if not len(known):
            return missing
        some = "" if len(known) == len(values) else f" ({len(known)} of {len(values)})"
        deviation = f" ± {known.std(ddof=1):.2g}" if len(known) > 1 else ""
        return f"{known.mean():.4g}{deviation}{some}"

    def by_hardware(self) -> dict[str, "Curves"]:
        """Return the runs of each processor, because times of two do not compare."""
        rows = [row for run in self._rows.values() for row in run]
        names = sorted({row["hardware"] for row in rows})
        return {
            name: Curves([row for row in rows if row["hardware"] == name], self.estimators)
            for name in names
        }

    def common_seconds(self) -> float:
        """Return the processor's time that every run reached."""
        return min(float(self.column(*run, "cpu_seconds")[-1]) for run in self._rows)

    def at_seconds(self, name: str, seconds: float) -> Value:
        """Return a function of (estimator, seed): ln-linear interpolation of a column at a processor time.

        A run has NaN before its first measurement, because its value there is not known.
        """

        def value(estimator: str, seed: int) -> float:
            times, values = (
                self.column(estimator, seed, column) for column in ("cpu_seconds", name)
            )
            return float(np.exp(np.interp(seconds, times, np.log(values), left=np.nan)))

        return value

    def images_to_reach(self, name: str, baseline: str) -> Value:
        """Return a function of (estimator, seed): the share of the baseline's images after which a run is as good.

        The goal is the last value of the baseline's run of the same seed. A run that does not reach it has NaN. Between
        two measurements the logarithm is linear. The time before the first measurement is not resolved.
        """

        def value(estimator: str, seed: int) -> float:
            goal = self.last(name)(baseline, seed)
            images, values = (self.column(estimator, seed, column) for column in ("images", name))
            below = np.flatnonzero(values <= goal)
            if not len(below):
                return math.nan
            first = below[0]
            if first == 0:
                return float(images[0] / images[-1])
            logs = np.log(values[first - 1 : first + 1])
            share = (logs[0] - math.log(goal)) / (logs[0] - logs[1])
            return float(
                (images[first - 1] + share * (images[first] - images[first - 1])) / images[-1]
            )

        return value

    def difference(self, value: Value, one: str, other: str, comparisons: int = 1) -> Difference:
        """Compare two estimators by the differences of runs with the same seed; see `interval`."""
        alone, together = (
            self.contrast(value, [one], [other], number) for number in (1, comparisons)
        )
        return Difference(alone, together)

    def contrast(
        self,
        value: Value,
        group: Sequence[str],
        others: Sequence[str],
        comparisons: int = 1,
    ) -> Interval:
        """Compare the means of two groups of estimators by the differences of runs with the same seed."""
        differences = []

        for seed in self.seeds(*group, *others):
            mean = np.mean([value(name, seed) for name in group])
            mean_of_others = np.mean([value(name, seed) for name in others])
            differences.append(float(mean - mean_of_others))

        return interval(differences, comparisons)


def derived(row: Row) -> dict[str, Any]:
    """Add the estimator's share of the time, and ratios of the gradient's moments.

    These are its variance and squared bias by one sample's variance, one sample's squared bias likewise, and its noise
    by its norm.
    """
    variance, plain = float(row["gradient_variance"]), float(row["one_sample_variance"])
    norm = math.sqrt(max(float(row["gradient_norm_sq"]), 0.0))
    added = {
        "bias_ratio": _ratio(float(row["gradient_bias_sq"]), plain),
        "one_sample_bias_ratio": _ratio(float(row["one_sample_bias_sq"]), plain),
        "variance_ratio": _ratio(variance, plain),
        "relative_noise": _ratio(math.sqrt(variance), norm),
        "estimator_share": float(row["estimator_seconds"]) / float(row["seconds"]),
    }
    return {**row, **added}


def _ratio(value: float, divisor: float) -> float:
    """Return the ratio, or NaN if there is none: with few pairs (z, t) no target may have noise."""
    return value / divisor if divisor else math.nan
