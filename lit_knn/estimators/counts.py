"""Options that count images or components: what the user gave, or a default that a small reference set takes down."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, overload

import torch.distributed as dist

from lit_knn.errors import InputError

T = TypeVar("T")

# The paper's, in its table of hyperparameters (tab:hyperparams): "KNN search size 2048", "Estimator batch size 256".
DEFAULT_K, DEFAULT_N = 2048, 256
# Ours: with r = 256 the error on CIFAR-10 is 3 to 8 times as large at t >= 2, and the time 0.9 times as long.
DEFAULT_R = 512


class Limit(NamedTuple):
    """The most that a reference set has of something.

    Attributes:
        of: the number for a set of N images of dimension d.
        text: what it is, with places for N, d and where.
    """

    of: Callable[[int, int], int]
    text: str

    def named(self, N: int, d: int, label: int | None = None) -> str:
        """What it is in a set of N images, all or those of a class."""
        where = "the reference set" if label is None else f"class {label}"
        return self.text.format(N=N, d=d, where=where)


IMAGES = Limit(lambda N, d: N, "the {N} images of {where}")
COMPONENTS = Limit(min, "min(N, d) = min({N}, {d}) of {where}")


class Count:
    """An option of an estimator, a class attribute: how many images or components it takes.

    Read from an estimator it is the number in effect: what was given; or the default, or all that the bound reference
    set has where that is less. It can be set to a number, or to None for the default.

    Args:
        default: the number where none is given.
        limit: the most that is possible; None where any number is.
        limited: whether the limit holds for an estimator; None where it holds for all.
    """

    def __init__(self, default: int, limit: Limit | None = None, limited: Callable[[Any], bool] | None = None) -> None:
        self.default = default
        self.limit = limit
        self.limited = limited

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
        """The number for a set of N images of dimension d.

        Raises:
            InputError: what was given is more than the set has.
        """
        wanted = self._wanted(estimator)
        if self.limit is None or (self.limited is not None and not self.limited(estimator)):
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


def fit_counts(estimator: Any, N: int, d: int, told: set[str], label: int | None = None) -> None:
    """Check the counts of an estimator against a set; a line tells of each default that is taken down.

    Args:
        estimator: with any number of `Count`s.
        N: images of the set.
        d: their dimension.
        told: names of the counts that a line has told of, which are not told of again; changed.
        label: the class whose images they are; None for all images.

    Raises:
        InputError: a count that was given is more than the set has.
    """
    # All are checked before a line tells of one.
    fitted = [(count, count.within(estimator, N, d)) for count in counts_of(estimator)]
    for count, number in fitted:
        if number < count._wanted(estimator) and count.name not in told:
            told.add(count.name)
            if not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
                # Of who called `bind`.
                warnings.warn(_line(estimator, count, number, N, d, label), stacklevel=5)


def counts_of(estimator: Any) -> Iterator[Count]:
    """The counts of an estimator."""
    for name in vars(estimator):
        count = getattr(type(estimator), name, None)
        if isinstance(count, Count):
            yield count


def settled(estimator: T) -> T:
    """A copy of a bound estimator to which the counts in effect are given, so that it keeps them in any set."""
    made = copy.copy(estimator)
    for count in counts_of(made):
        setattr(made, count.name, getattr(made, count.name))
    return made


def check_count(owner: str, option: str, value: int) -> int:
    """Return `value` if it is an integer of at least 1.

    Raises:
        InputError: another type, or value < 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{owner}: {option} must be an integer, got {value!r}")
    if value < 1:
        raise InputError(f"{owner}: {option} must be at least 1, got {value}")
    return value


def _line(estimator: Any, count: Count, number: int, N: int, d: int, label: int | None) -> str:
    assert count.limit is not None
    what = f"{type(estimator).__name__}: the default {count.name}={count.default} is more than"
    going_on = f"with {count.name}={number}" if label is None else "in each class with as many as it has"
    return f"{what} {count.limit.named(N, d, label)}; going on {going_on}"
