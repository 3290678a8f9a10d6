"""Options that count images or components. A given count is fixed. A small reference set reduces a default count."""

import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any

from lit_knn.common.distributed import rank_and_size
from lit_knn.common.errors import InputError
from lit_knn.reference import ReferenceSet

# The paper's hyperparameters (tab:hyperparams): "KNN search size 2048", "Estimator batch size 256".
DEFAULT_K, DEFAULT_N = 2048, 256
# This default is our own: on CIFAR-10 at t >= 2, r = 256 has 3 to 8 times the error and takes 0.9 times as long.
DEFAULT_R = 512

Limit = Callable[[int, int], tuple[int, str]]
"""(N, d) -> the upper limit of a count for N images of dimension d, and a text that describes it."""


def of_images(N: int, d: int) -> tuple[int, str]:
    """Limit a count by the number of images."""
    return N, f"the {N} images"


def of_components(N: int, d: int) -> tuple[int, str]:
    """Limit a count by the number of principal components."""
    return min(N, d), f"min(N, d) = min({N}, {d})"


class Count:
    """Descriptor for an estimator option that counts images or components.

    Reading the option from an estimator gives the number in effect: the given number, or else the default, reduced to
    the limit of the bound reference set. Set the option to a number, or to None for the default.

    Args:
        default: the number if none is given.
        limit: `of_images`, `of_components`, or None if there is no limit.
    """

    def __init__(self, default: int, limit: Limit | None = None) -> None:
        self.default, self.limit = default, limit

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, estimator: Any, owner: type) -> Any:
        if estimator is None:
            return self
        bound = estimator._reference
        return self.within(estimator, *(None, None) if bound is None else (bound.N, bound.d))

    def __set__(self, estimator: Any, value: int | None) -> None:
        vars(estimator)[self.name] = None if value is None else check_count(type(estimator).__name__, self.name, value)

    def within(self, estimator: Any, N: int | None, d: int | None) -> int:
        """Return the number for N images of dimension d, or without a set. It must not exceed the limit."""
        given = vars(estimator).get(self.name)
        wanted = self.default if given is None else given
        if self.limit is None or N is None or d is None:
            return wanted
        most, what = self.limit(N, d)
        if given is not None and given > most:
            told = f"{type(estimator).__name__}: {self.name}={given} is more than {what} of the reference set"
            raise InputError(f"{told}: give {self.name} <= {most}, or null for the default, which is taken down")
        return min(wanted, most)


def fit_counts(estimator: Any, reference: ReferenceSet) -> None:
    """Check the counts of an estimator against a set, and warn about each default that is reduced."""
    kind = type(estimator)
    counts = [count for name in vars(estimator) if isinstance(count := getattr(kind, name, None), Count)]
    # All counts are checked before the first warning.
    for count, number in [(count, count.within(estimator, reference.N, reference.d)) for count in counts]:
        about = f"{kind.__name__}.{count.name}"
        if count.limit is None or number >= count.default or vars(estimator)[count.name] is not None:
            continue
        where, going_on = "the reference set", f"with {count.name}={number}"
        if reference.label is not None:
            # One warning serves all classes of a set.
            if about in reference.told:
                continue
            reference.told.add(about)
            where, going_on = f"class {reference.label}", "in each class with as many as it has"
        if rank_and_size()[0] == 0:
            more = f"the default {count.name}={count.default} is more than {count.limit(reference.N, reference.d)[1]}"
            # This stack level is the caller of `bind`.
            warnings.warn(f"{kind.__name__}: {more} of {where}; going on {going_on}", stacklevel=4)


def check_count(owner: str, option: str, value: int) -> int:
    """Return `value`, or raise InputError if it is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{owner}: {option} must be an integer, got {value!r}")
    if value < 1:
        raise InputError(f"{owner}: {option} must be at least 1, got {value}")
    return int(value)
