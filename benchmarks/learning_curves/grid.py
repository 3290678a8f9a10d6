"""The grid of runs: set × module × estimator × seed, in the order in which they are made."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.learning_curves.sets import CIFAR
from lit_knn.common.errors import InputError
from lit_knn.estimators import (
    KNN,
    STF,
    Estimator,
    Exact,
    Mixed,
    Noised,
    OneSample,
    Switched,
    UniformSNIS,
)
from lit_knn.estimators.noised import Covariance

MODULES = ("EDM", "flow", "iCT", "ECT", "MeanFlow", "sCT", "score difference")
# They regress the posterior mean. The exact target of the others takes no classes.
REGRESSIONS = ("EDM", "flow")
# Variants for experiments: another start, a squared loss in place of a robust one, other times or learning rates, or
# another map to the teacher.
VARIANTS = (
    "score difference from nothing",
    "MeanFlow power 0",
    "MeanFlow v1",
    "sCT without norm",
    "ECT squared",
    "ECT lr 1e-3",
    "ECT lr 3e-4",
    "ECT lr 1e-4",
    "ECT k 0",
)
# k and n of the digits are those of configs/table1/digits.yaml. k = 2048 is the paper's (tab:hyperparams); its n = 256
# would take longer than the network's step.
NEIGHBOURS = {"digits": 256, **dict.fromkeys(CIFAR, 2048)}
# Samples that the score difference keeps. KNN has no more neighbours than these.
BANK_SIZE = 1792
# Other sets than the complete ones have the two extremes alone.
EXTREMES, COMPLETE = ("OneSample", "Exact"), ("digits", "cifar16", "cifar32")
# Shares of the exact mean in a mean flow's mixed targets; a share is also the name of the mix.
SHARES = ("0.5", "0.94")
# Below these t the posterior is the source alone, so that the enumeration can be spared (docs/probe.md).
COLLAPSE = {"cifar16": 0.8, "cifar32": 1.8}
# EDM's noise of targets by design: names are a covariance and a scale of `Noised`. Scale 0 is `Exact`. On 1,000 images
# `isotropic 6` has about the gradient variance of `posterior 1`, and 0.02 is a control with hardly any noise.
COVARIANCES: tuple[Covariance, ...] = ("posterior", "isotropic", "shuffled")
SCALES = {
    "cifar16_1000": (1.0, 0.5, 2.0, 6.0, 0.02),
    "cifar16_5000": (1.0, 6.0),
    "cifar16": (1.0, 6.0),
}

PlugIns = dict[str, Any]
"""The estimators of a module, by the names of its options."""
Part = Callable[[], Estimator | str]
"""Makes an estimator, or the name of a tangent that is none."""


def targets(name: str, module: str) -> dict[str, Callable[[], PlugIns]]:
    """Return what makes the estimators of a module on a set, by name.

    A mean flow has a target and a tangent; one name stands for both, and a number for the exact mean's share of a mix.
    `network` is the tangent of the network's own velocity.
    """
    parts: dict[str, Part] = {
        "OneSample": OneSample,
        "STF": lambda: STF(n=64),
        "KNN": lambda: KNN(NEIGHBOURS[name], n=64),
        "Exact": Exact,
    }
    if name in COLLAPSE:
        parts["Switched"] = lambda: Switched(OneSample(), Exact(), t=COLLAPSE[name])
    if module.startswith("score difference"):
        return score_difference_means(parts, searches=NEIGHBOURS[name] <= BANK_SIZE)
    pairs: list[tuple[str, str]] = []
    if module.startswith("MeanFlow"):
        del parts["STF"]
        parts |= {share: partial(Mixed, OneSample(), Exact(), float(share)) for share in SHARES}
        pairs = [("OneSample", tangent) for tangent in ("KNN", *SHARES, "Exact", "network")]
        pairs += [("Exact", tangent) for tangent in ("OneSample", "network")]
    made: dict[str, Callable[[], PlugIns]] = {
        estimator: partial(_plug_ins, estimator=part) for estimator, part in parts.items()
    }
    parts["network"] = lambda: "network"
    made |= {
        f"{one}, {other}": partial(_plug_ins, estimator=parts[one], tangent=parts[other])
        for one, other in pairs
    }
    if name not in COMPLETE:
        made = {extreme: made[extreme] for extreme in EXTREMES}
    if module == "EDM":
        made |= noised_targets(SCALES.get(name, ()))
    return made


def score_difference_means(
    parts: Mapping[str, Part], searches: bool
) -> dict[str, Callable[[], PlugIns]]:
    """Return what makes both posterior means of the score difference, the data's and the samples', by name.

    128 random images for each z stand in the place of one sample, which estimates neither of them. Where KNN
    has more neighbours than the bank has samples, as many random images as samples meet all of them.
    """
    few = partial(UniformSNIS, n=128)
    # The estimators of the data's mean and of the samples'.
    pairs: dict[str, tuple[Part, Part]] = {"128 images": (few, few)}
    if searches:
        pairs["KNN"] = (parts["KNN"], parts["KNN"])
    else:
        pairs[f"{BANK_SIZE} images"] = (partial(UniformSNIS, n=BANK_SIZE), Exact)
    pairs["Exact"] = (Exact, Exact)
    return {
        name: partial(_plug_ins, estimator=of_data, repulsion=of_samples)
        for name, (of_data, of_samples) in pairs.items()
    }


def noised_targets(scales: Sequence[float]) -> dict[str, Callable[[], PlugIns]]:
    """Return what makes the exact target with noise of each covariance and scale, by names such as `posterior 1`."""
    made: dict[str, Callable[[], PlugIns]] = {}
    for scale in scales:
        for covariance in COVARIANCES:
            part = partial(Noised, Exact(), covariance, scale)
            made[f"{covariance} {scale:g}"] = partial(_plug_ins, estimator=part)
    return made


def _plug_ins(**parts: Part) -> PlugIns:
    return {name: part() for name, part in parts.items()}


class Run(NamedTuple):
    """One training of the grid."""

    set: str
    module: str
    estimator: str
    seed: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def runs_of(
    name: str,
    modules: Sequence[str] | None,
    estimators: Sequence[str] | None,
    seeds: int,
    first_seed: int = 0,
) -> list[Run]:
    """List the runs of a set, all of the first seed first, so that a picture of everything exists early.

    Args:
        name: the set.
        modules: modules and variants; None stands for all modules of the set, without variants.
        estimators: those to train; a module trains those of them that it has. None stands for all.
        seeds: number of seeds.
        first_seed: the first of them.

    Raises:
        InputError: an unknown module or estimator, a module that has none of the estimators, or no seed.
    """
    by_class = CIFAR.get(name, {}).get("by_class", False)
    modules = modules or (REGRESSIONS if by_class else MODULES)
    allowed = REGRESSIONS if by_class else (*MODULES, *VARIANTS)
    _check_known("--modules", modules, allowed, name)
    known = {module: list(targets(name, module)) for module in modules}
    everywhere = {each for names in known.values() for each in names}
    _check_known("--estimators", estimators or (), everywhere, " and ".join(modules))
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {seeds}")
    if first_seed < 0:
        raise InputError(f"--first-seed must be at least 0, got {first_seed}")

    chosen: dict[str, list[str]] = {}
    for module, names in known.items():
        chosen[module] = [each for each in names if estimators is None or each in estimators]
        if not chosen[module]:
            raise InputError(
                f"--estimators: {module} has none of them, it has {', '.join(names)}; leave it out of --modules"
            )
    return [
        Run(name, module, estimator, seed)
        for seed in range(first_seed, first_seed + seeds)
        for module, names in chosen.items()
        for estimator in names
    ]


def _check_known(option: str, names: Sequence[str], allowed: Collection[str], owner: str) -> None:
    """Raise InputError with the allowed names if one of `names` is not among them."""
    for name in names:
        if name not in allowed:
            raise InputError(f"{option} {name}: {owner} has {', '.join(sorted(allowed))}")
