"""Estimators that are made of others: their base, and the copies that they bind."""

import copy
from abc import abstractmethod
from typing import TypeVar, cast

from torch import Generator, Tensor

from lit_knn.estimators.base import Estimator
from lit_knn.estimators.checks import Query

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
