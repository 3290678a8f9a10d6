"""Estimators that are made of others: their bases, and the copies that they bind."""

import copy
from abc import abstractmethod
from typing import Self, TypeVar, cast

from torch import Generator, Tensor

from lit_knn.common.errors import InputError, check_is, prefixed
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.query import Query
from lit_knn.reference import ReferenceSet

AnyEstimator = TypeVar("AnyEstimator", bound=Estimator)


class Composite(Estimator):
    """Base of the estimators that pass a whole query on to others, which then copy its arguments and draw.

    A subclass implements `mean_of`, also for queries with labels and maps of images.
    """

    @abstractmethod
    def mean_of(self, query: Query) -> Tensor:
        """Combine what `mean_of` of the parts returns: (B, *shape)."""

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        return self.mean_of(Query(z, t, x_source, generator))


class Wrapper(Estimator):
    """Base of the estimators that change the estimates of one other.

    Args:
        estimator: the other estimator; it is copied.

    Attributes:
        part: the copy, which is bound to the images of the wrapper.
    """

    def __init__(self, estimator: Estimator) -> None:
        with prefixed(type(self).__name__):
            check_is(Estimator, estimator, "estimator")
        if estimator.takes_labels:
            name, part = type(self).__name__, type(estimator).__name__
            advice = f"for classes use ByClass({name}(...))"
            raise InputError(f"{name}: {part} takes labels itself; {advice}")
        self.estimator = self.part = estimator
        self.uses_source = estimator.uses_source

    def check_lies_within(self, lowest: float, highest: float) -> None:
        self.estimator.check_lies_within(lowest, highest)

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        if self.estimator.needs_reference:
            with prefixed(type(self).__name__):
                self.part = copied_apart(self.estimator).bind(reference)
        return self


def copied_apart(estimator: AnyEstimator) -> AnyEstimator:
    """Copy an estimator with the dicts, lists, sets and estimators that it holds.

    So two copies, such as those of two classes, share no results. An estimator that it holds twice is copied once.
    """
    return cast(AnyEstimator, _copied(estimator, {}))


def _copied(value: object, copies: dict[int, Estimator]) -> object:
    """Copy an estimator, or a container and the estimators in it. Other values stay the same objects.

    `copies` holds the copies that have been made, by the `id` of the original.
    """
    if isinstance(value, Estimator):
        return _copied_estimator(value, copies)

    # Only plain containers are built anew, because the constructor of a subclass may take other arguments.
    if type(value) is list:
        return [_copied(part, copies) for part in value]
    if type(value) is tuple:
        return tuple(_copied(part, copies) for part in value)
    if type(value) is dict:
        return {key: _copied(part, copies) for key, part in value.items()}
    # A subclass is copied with its state. A set is copied without its items, which no class here changes.
    if isinstance(value, (dict, list, set)):
        return copy.copy(value)
    return value


def _copied_estimator(estimator: Estimator, copies: dict[int, Estimator]) -> Estimator:
    """Copy an estimator and what its attributes hold, unless `copies` already has its copy."""
    if id(estimator) not in copies:
        new_copy = copy.copy(estimator)
        # Enter the copy before its attributes are copied, because one of them may lead back to this estimator.
        copies[id(estimator)] = new_copy
        for name, value in list(vars(new_copy).items()):
            vars(new_copy)[name] = _copied(value, copies)
    return copies[id(estimator)]
