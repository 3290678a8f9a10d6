"""Published claims about better targets, judged by paired differences over seeds."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.learning_curves.statistics import Curves, Interval

HOLDS, FAILS, OPEN = "holds", "does not hold", "not significant"
LOWER, EQUAL = "lower", "equal"
PLAIN, NEIGHBOURS, CLOSED_FORM = "OneSample", ("KNN",), ("Exact",)
# One sample as the target of a mean flow, and the exact velocity as its tangent.
MARGINAL_TANGENT = "OneSample, Exact"


class Judged(NamedTuple):
    """A claim, the estimators that it compares, their difference and the verdict.

    Attributes:
        source: who claims it.
        claim: what is claimed, in words.
        pair: the estimators, first minus second.
        difference: its t-interval; for means of logarithms a ratio is e to the power of it.
        verdict: `HOLDS`, `FAILS` or `OPEN`.
    """

    source: str
    claim: str
    pair: tuple[str, str]
    difference: Interval
    verdict: str


def judge(curves: Curves, comparisons: int = 1) -> list[Judged]:
    """Judge the claims for one module, with intervals for `comparisons`; pairs need two common seeds."""
    return [each for each in _claims(curves, comparisons) if each.difference.seeds > 1]


def _claims(curves: Curves, comparisons: int) -> Iterator[Judged]:
    last = curves.last(curves.quality)

    def course(estimator: str, seed: int) -> float:
        return float(np.log(curves.course(estimator, seed, curves.quality)).mean())

    if PLAIN not in curves.estimators or len(curves.estimators) < 2:
        return
    for name in [each for each in curves.estimators if each in NEIGHBOURS]:
        yield _compared(curves, "the paper", "better samples at the end", last, name, PLAIN, LOWER, comparisons)
        claim = f"faster convergence (mean ln {curves.quality})"
        yield _compared(curves, "the paper", claim, course, name, PLAIN, LOWER, comparisons)
    claim = "stochastic and closed-form targets end equal"
    for name in [each for each in curves.estimators if each in CLOSED_FORM]:
        yield _compared(curves, "2506.03719", claim, last, PLAIN, name, EQUAL, comparisons)
    if MARGINAL_TANGENT in curves.estimators:
        claim = "a marginal tangent samples better"
        yield _compared(curves, "2512.02012", claim, last, MARGINAL_TANGENT, PLAIN, LOWER, comparisons)
    yield from _best_variance(curves, comparisons)


def _best_variance(curves: Curves, comparisons: int) -> Iterator[Judged]:
    """Judge whether another estimator has better samples than the one with the least variance of the gradient.

    The other one is the best of several, chosen by the same samples, so the interval is for as many comparisons.
    """
    if not curves.measured("variance_ratio"):
        return
    variance = {name: curves.band(name, "variance_ratio")[1][-1] for name in curves.estimators}
    least = min(variance, key=lambda name: variance[name])
    others = [name for name in curves.estimators if variance[name] > variance[least]]
    best = min(others, key=lambda name: curves.band(name, curves.quality)[1][-1])
    claim, last = "the least variance is not the best sample", curves.last(curves.quality)
    yield _compared(curves, "2605.09235", claim, last, best, least, LOWER, comparisons * len(others))


def _compared(
    curves: Curves,
    source: str,
    claim: str,
    value: Callable[[str, int], float],
    one: str,
    other: str,
    claimed: str,
    comparisons: int,
) -> Judged:
    difference = curves.difference(value, one, other, comparisons)
    # An interval around 0 does not show that two are equal: it bounds how much they may differ.
    wanted = {LOWER: {-1: HOLDS, 0: OPEN, 1: FAILS}, EQUAL: {-1: FAILS, 0: "no significant difference", 1: FAILS}}
    return Judged(source, claim, (one, other), difference, wanted[claimed][difference.sign])
