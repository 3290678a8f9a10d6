"""Published claims about better targets, judged by paired differences over seeds."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.learning_curves.intervals import Interval
from benchmarks.learning_curves.statistics import Curves

HOLDS, FAILS, OPEN = "holds", "does not hold", "not significant"
NO_DIFFERENCE = "no significant difference"
LOWER, NOT_HIGHER, EQUAL = "lower", "not higher", "equal"
PLAIN, NEIGHBOURS, CLOSED_FORM, NETWORK = "OneSample", ("KNN",), ("Exact",), "network"
# Noise by design: claims about these pairs, the measure that they name, and what is claimed of their difference.
POSTERIOR, NO_NOISE = "posterior 1", "Exact"
LOSS, PATCHES = "held_out_loss", "distance_to_patches"
NOISE_CLAIMS = (
    ("2504.12532", "the target's noise lowers the loss at new images", NO_NOISE, LOSS, LOWER),
    ("2506.03719", "the target's noise leaves the loss at new images", NO_NOISE, LOSS, EQUAL),
    ("2504.12532", "its direction lowers that loss", "isotropic 1", LOSS, LOWER),
    ("2504.12532", "its place lowers that loss", "shuffled 1", LOSS, LOWER),
    ("ours", "noise of equal gradient variance lowers it as much", "isotropic 6", LOSS, EQUAL),
    ("2504.12532", "it brings a network nearer to patches", NO_NOISE, PATCHES, LOWER),
)


class Judged(NamedTuple):
    """A claim, the estimators that it compares, their difference and the verdict.

    Attributes:
        source: who claims it.
        claim: what is claimed, in words.
        pair: the estimators or groups of estimators, first minus second.
        difference: its t-interval; for means of logarithms a ratio is e to the power of it.
        verdict: `HOLDS`, `FAILS` or `OPEN`.
    """

    source: str
    claim: str
    pair: tuple[str, str]
    difference: Interval
    verdict: str


class Contrast(NamedTuple):
    """Two groups of a mean flow's pairs of target and tangent, whose means are compared, and the groups' names."""

    group: list[str]
    others: list[str]
    names: tuple[str, str]


class Contrasts(NamedTuple):
    """What a mean flow's pairs tell about targets, whatever the tangent, and about tangents of one-sample targets."""

    targets: Contrast
    tangents: Contrast


def contrasts(estimators: Sequence[str]) -> Contrasts | None:
    """Return the contrasts of a mean flow, or None for estimators without such pairs.

    A name of a pair is "target, tangent"; one name alone is both. Pairs with the network's velocity are left out,
    because it is no estimate of the data's.
    """
    estimators = [name for name in estimators if name.partition(", ")[2] != NETWORK]
    plain_target = [name for name in estimators if name.partition(", ")[0] == PLAIN]
    better_target = [name for name in estimators if name not in plain_target]
    better_tangent = [name for name in plain_target if name != PLAIN]

    if PLAIN not in plain_target or not better_target or not better_tangent:
        return None

    targets = Contrast(better_target, plain_target, ("better targets", "one-sample targets"))
    return Contrasts(
        targets, Contrast(better_tangent, [PLAIN], ("better tangents", "one-sample tangent"))
    )


def judge(curves: Curves, comparisons: int = 1) -> list[Judged]:
    """Judge the claims for one module, with intervals for `comparisons`; pairs need two common seeds."""
    return [each for each in _claims(curves, comparisons) if each.difference.seeds > 1]


def _claims(curves: Curves, comparisons: int) -> Iterator[Judged]:
    yield from _noise_claims(curves, comparisons)
    last = curves.last(curves.quality)

    def course(estimator: str, seed: int) -> float:
        return float(np.log(curves.course(estimator, seed, curves.quality)).mean())

    if PLAIN not in curves.estimators or len(curves.estimators) < 2:
        return

    pooled = contrasts(curves.estimators)
    better = [
        Contrast([name], [PLAIN], (name, PLAIN)) for name in curves.estimators if name in NEIGHBOURS
    ]

    if pooled:  # A single one of a mean flow's pairs is chosen from many.
        better = [pooled.targets]

    for each in better:
        yield _compared(
            curves, "the paper", "better samples at the end", last, each, LOWER, comparisons
        )
        claim = f"faster convergence (mean ln {curves.quality})"
        yield _compared(curves, "the paper", claim, course, each, LOWER, comparisons)

    # Its abstract: comparable statistical performance, and closed-form targets can even improve it.
    claim = "closed-form targets sample as well, or better"

    for name in [each for each in curves.estimators if each in CLOSED_FORM]:
        pair = Contrast([name], [PLAIN], (name, PLAIN))
        yield _compared(curves, "2506.03719", claim, last, pair, NOT_HIGHER, comparisons)

    for target in (PLAIN, *CLOSED_FORM):
        own_velocity = f"{target}, {NETWORK}"
        if {target, own_velocity} <= set(curves.estimators):
            claim = "the network's velocity as the tangent samples better"
            pair = Contrast([own_velocity], [target], (own_velocity, target))
            yield _compared(curves, "2512.02012", claim, last, pair, LOWER, comparisons)

    if pooled:
        claim = "a tangent nearer to the marginal one samples better"
        yield _compared(curves, "2512.02012", claim, last, pooled.tangents, LOWER, comparisons)

    yield from _best_variance(curves, comparisons)


def _noise_claims(curves: Curves, comparisons: int) -> Iterator[Judged]:
    """Judge the claims about noise by design: posterior noise minus no noise or noise of another covariance."""
    for source, claim, other, measure, claimed in NOISE_CLAIMS:
        if {POSTERIOR, other} <= set(curves.estimators):
            pair = Contrast([POSTERIOR], [other], (POSTERIOR, other))
            yield _compared(curves, source, claim, curves.last(measure), pair, claimed, comparisons)


def _best_variance(curves: Curves, comparisons: int) -> Iterator[Judged]:
    """Judge whether another estimator has better samples than the one with the least variance of the gradient.

    The other one is the best of several, chosen by the same samples, so the interval is for as many comparisons.
    """
    variance = {name: curves.band(name, "variance_ratio")[1][-1] for name in curves.estimators}
    if any(map(math.isnan, variance.values())):
        return
    least = min(variance, key=lambda name: variance[name])
    others = [name for name in curves.estimators if variance[name] > variance[least]]
    if not others:
        return
    best = min(others, key=lambda name: curves.band(name, curves.quality)[1][-1])
    claim, last = "the least variance is not the best sample", curves.last(curves.quality)
    pair = Contrast([best], [least], (best, least))
    yield _compared(curves, "2605.09235", claim, last, pair, LOWER, comparisons * len(others))


def _compared(
    curves: Curves,
    source: str,
    claim: str,
    value: Callable[[str, int], float],
    pair: Contrast,
    claimed: str,
    comparisons: int,
) -> Judged:
    difference = curves.contrast(value, pair.group, pair.others, comparisons)
    # An interval around 0 does not show that two are equal: it bounds how much they may differ.
    wanted = {
        LOWER: {-1: HOLDS, 0: OPEN, 1: FAILS},
        NOT_HIGHER: {-1: HOLDS, 0: NO_DIFFERENCE, 1: FAILS},
        EQUAL: {-1: FAILS, 0: NO_DIFFERENCE, 1: FAILS},
    }
    return Judged(source, claim, pair.names, difference, wanted[claimed][difference.sign])
