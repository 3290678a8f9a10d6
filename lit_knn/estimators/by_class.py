"""Wrapper that lets any estimator average over the images of each z's class."""

from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, check_is, prefixed
from lit_knn.common.memory import to_device
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.composite import Composite, copied_apart
from lit_knn.estimators.query import Query
from lit_knn.nets.base import NO_CLASS
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of, rows_by_label


class ByClass(Composite):
    """Estimates E[x|z,t,class], the mean over the images of each z's class. `posterior_mean` needs `labels`.

    `bind` binds a copy of the wrapped estimator to each class of the reference set, with its own index. A given count
    such as k must not exceed the size of any class; a default count is reduced to the size of each class.

    Args:
        estimator: the estimator to wrap; it is copied.
        unlabelled: also estimate E[x|z,t], over all images, for the label `NO_CLASS`. Training with label dropout needs
            this. `bind` then binds one more copy, to the whole set, with an index of all images.

    Attributes:
        parts: the copies by label; filled by `bind`.

    Raises:
        InputError: at `bind`, the set has no labels or is sharded, or the settings do not fit a class.
    """

    takes_labels = True

    def __init__(self, estimator: Estimator, unlabelled: bool = False) -> None:
        with prefixed("ByClass"):
            check_is(Estimator, estimator, "estimator")
        if estimator.takes_labels:
            raise InputError(f"ByClass: {type(estimator).__name__} takes labels itself")
        self.estimator, self.unlabelled = estimator, unlabelled
        self.deterministic, self.uses_source = estimator.deterministic, estimator.uses_source
        self.parts: dict[int, Estimator] = {}

    @property
    def can_warp(self) -> bool:
        return self.estimator.can_warp

    def by_class(self, wrap: Callable[[Estimator], Estimator]) -> Estimator:
        return self if self.unlabelled else wrap(self.estimator)

    def check_lies_within(self, lowest: float, highest: float) -> None:
        self.estimator.check_lies_within(lowest, highest)

    def bind(self, reference: ReferenceSet) -> Self:
        """Bind a copy of the estimator to the images of each class, and with `unlabelled` one to all images."""
        super().bind(reference)
        self.parts = {}
        for label, images in classes_of(reference).items():
            with prefixed(f"class {label}"):
                self.parts[label] = copied_apart(self.estimator).bind(images)
        if self.unlabelled:
            self.parts[NO_CLASS] = copied_apart(self.estimator).bind(reference)
        return self

    def mean_of(self, query: Query) -> Tensor:
        """Let the part of each label estimate the items of the label."""
        result = torch.empty_like(query.z)
        for part, rows in self._rows(query):
            result[to_device(rows, result.device)] = part.mean_of(query.rows(rows))
        return result

    def log_density_of(self, query: Query) -> Tensor:
        result = query.z.new_zeros(len(query.z), dtype=torch.float64)
        for part, rows in self._rows(query):
            result[to_device(rows, result.device)] = part.log_density_of(query.rows(rows))
        return result

    def _rows(self, query: Query) -> Iterator[tuple[Estimator, Tensor]]:
        """Yield the part of each label of a query, and the rows of the items with this label."""
        if query.labels is None:
            raise InputError("ByClass: labels missing: it needs the class of each z")
        for label, rows in rows_by_label(query.labels).items():
            if label not in self.parts:
                number = len(self.parts) - (1 if self.unlabelled else 0)
                raise InputError(
                    f"label {label} is none of the {number} classes of the reference set"
                )
            yield self.parts[label], rows


def class_conditional(estimator: Estimator, unlabelled: bool = False) -> Estimator:
    """Make an estimator average over the images of each item's class. For `unlabelled`, see `ByClass`.

    Estimators that take labels themselves, or that average over no images, stay unchanged.
    """
    return estimator.by_class(lambda part: ByClass(part, unlabelled))
