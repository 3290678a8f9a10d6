"""Options that count images or components. A given count is fixed. A small reference set reduces a default count."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, overload

import torch.distributed as dist

from lit_knn.errors import InputError
from lit_knn.reference import Reference

T = TypeVar("T")

# The paper's hyperparameters (tab:hyperparams): "KNN search size 2048", "Estimator batch size 256".
DEFAULT_K, DEFAULT_N = 2048, 256
# This default is our own: on CIFAR-10 at t >= 2, r = 256 has 3 to 8 times the error and takes 0.9 times as long.
DEFAULT_R = 512


class Limit(NamedTuple):
    """Upper limit of a count, which depends on the reference set.

    Attributes:
        of: function (N, d) -> limit for a set of N images of dimension d.
        text: description of the limit, with placeholders for N, d and where.
    """

    of: Callable[[int, int], int]
    text: str

    def named(self, N: int, d: int, where: str = "the reference set") -> str:
        """Describe the limit for a set that is called `where`."""
        return self.text.format(N=N, d=d, where=where)


IMAGES = Limit(lambda N, d: N, "the {N} images of {where}")
COMPONENTS = Limit(min, "min(N, d) = min({N}, {d}) of {where}")


class Count:
    """Descriptor for an estimator option that counts images or components.

    Reading it from an estimator gives the number in effect: the given number, or else the default, reduced to the limit
    of the bound reference set. Set it to a number, or to None for the default.

    Args:
        default: the number if none is given.
        limit: the largest possible number; None if there is no limit.
    """

    def __init__(self, default: int, limit: Limit | None = None) -> None:
        self.default = default
        self.limit = limit

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, estimator: None, owner: type) -> "Count": ...

    @overload
    def __get__(self, estimator: Any, owner: type) -> int: ...

    def __get__(self, estimator: Any, owner: type) -> "Count | int":
        if estimator is None:
            return self
        bound = estimator._reference
        return self._wanted(estimator) if bound is None else self.within(estimator, bound.N, bound.d)

    def __set__(self, estimator: Any, value: int | None) -> None:
        given = None if value is None else check_count(type(estimator).__name__, self.name, value)
        vars(estimator)[self.name] = given

    def within(self, estimator: Any, N: int, d: int) -> int:
        """Return the number for a set of N images of dimension d.

        Raises:
            InputError: the given number is above the limit of the set.
        """
        wanted = self._wanted(estimator)
        if self.limit is None:
            return wanted
        most = self.limit.of(N, d)
        if wanted <= most:
            return wanted
        if self._given(estimator) is not None:
            raise InputError(
                f"{type(estimator).__name__}: {self.name}={wanted} is more than {self.limit.named(N, d)}: "
                f"give {self.name} <= {most}, or null for the default, which is taken down"
            )
        return most

    def _given(self, estimator: Any) -> int | None:
        return vars(estimator).get(self.name)

    def _wanted(self, estimator: Any) -> int:
        given = self._given(estimator)
        return self.default if given is None else given


def fit_counts(estimator: Any, reference: Reference) -> None:
    """Check the counts of an estimator against a set, and warn about each default that is reduced.

    Raises:
        InputError: a given count is above the limit of the set.
    """
    # Check all counts before the first warning.
    fitted = [(count, count.within(estimator, reference.N, reference.d)) for count in counts_of(estimator)]
    for count, number in fitted:
        # Warn once for all classes of a set.
        about = f"{type(estimator).__name__}.{count.name}"
        if number < count._wanted(estimator) and about not in reference.told:
            if reference.label is not None:
                reference.told.add(about)
            if not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
                # This stack level is the caller of `bind`.
                warnings.warn(_line(estimator, count, number, reference), stacklevel=4)


def counts_of(estimator: Any) -> Iterator[Count]:
    """Yield the counts of an estimator."""
    for name in vars(estimator):
        count = getattr(type(estimator), name, None)
        if isinstance(count, Count):
            yield count


def settled(estimator: T) -> T:
    """Copy a bound estimator and fix its counts at the numbers in effect, so that no other set changes them."""
    made = copy.copy(estimator)
    for count in counts_of(made):
        setattr(made, count.name, getattr(made, count.name))
    return made


def check_count(owner: str, option: str, value: int) -> int:
    """Return `value`, or raise InputError if it is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{owner}: {option} must be an integer, got {value!r}")
    if value < 1:
        raise InputError(f"{owner}: {option} must be at least 1, got {value}")
    return value


def _line(estimator: Any, count: Count, number: int, reference: Reference) -> str:
    assert count.limit is not None
    what = f"{type(estimator).__name__}: the default {count.name}={count.default} is more than"
    where = "the reference set" if reference.label is None else f"class {reference.label}"
    going_on = f"with {count.name}={number}" if reference.label is None else "in each class with as many as it has"
    return f"{what} {count.limit.named(reference.N, reference.d, where)}; going on {going_on}"
