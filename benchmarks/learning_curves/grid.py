"""The grid of runs: set × module × estimator × seed, in the order in which they are made."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN, STF, Estimator, Exact, OneSample, SubspaceKNN

MODULES = ("EDM", "flow", "iCT", "ECT")
# k and n of the digits are those of configs/table1/digits.yaml. k = 2048 is the paper's (tab:hyperparams); its n = 256
# would take longer than the network's step.
ESTIMATORS: Mapping[str, Mapping[str, Callable[[], Estimator]]] = {
    "digits": {
        "OneSample": OneSample,
        "STF": lambda: STF(n=64),
        "KNN": lambda: KNN(k=256, n=64),
        "Exact": Exact,
    },
    "cifar16": {
        "OneSample": OneSample,
        "STF": lambda: STF(n=64),
        "KNN": lambda: KNN(k=2048, n=64),
        "SubspaceKNN": lambda: SubspaceKNN(n=64),
    },
}


class Run(NamedTuple):
    """One training of the grid."""

    set: str
    module: str
    estimator: str
    seed: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def runs_of(name: str, modules: Sequence[str], estimators: Sequence[str] | None, seeds: int) -> list[Run]:
    """List the runs of a set, all of seed 0 first, so that a picture of everything exists early.

    Raises:
        InputError: an unknown module or estimator, or no seed.
    """
    known = ESTIMATORS[name]
    chosen = list(known) if estimators is None else list(estimators)
    for option, names, allowed in (("--modules", modules, MODULES), ("--estimators", chosen, known)):
        unknown = next((each for each in names if each not in allowed), None)
        if unknown is not None:
            raise InputError(f"{option} {unknown}: {name} has {', '.join(allowed)}")
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {seeds}")
    return [Run(name, module, estimator, seed) for seed in range(seeds) for module in modules for estimator in chosen]
