"""Wrapper that lets any estimator average over the images of each z's class."""

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator, Holdings
from lit_knn.index.base import with_progress
from lit_knn.reference import Reference, ReferenceSet
from lit_knn.reference.classes import rows_by_label


class ByClass(Estimator):
    """Estimates E[x|z,t,class], the mean over the images of each z's class. `posterior_mean` needs `labels`.

    `bind` binds a copy of the wrapped estimator to each class of the reference set, with its own index. A given count
    such as k must not exceed the size of any class; a default count is reduced to the size of each class.

    Args:
        estimator: the estimator to wrap; it is copied.

    Attributes:
        parts: the copies by label; filled by `bind`.

    Raises:
        InputError: the estimator takes labels itself; at `bind`, the set has no labels or is sharded, or the settings
            do not fit a class, which the message names.
    """

    def __init__(self, estimator: Estimator) -> None:
        if estimator.knows_classes:
            raise InputError(f"ByClass: {type(estimator).__name__} takes labels itself")
        self.estimator = estimator
        self.deterministic, self.uses_source = estimator.deterministic, estimator.uses_source
        self.parts: dict[int, Estimator] = {}

    @property
    def can_warp(self) -> bool:
        """Whether the wrapped estimator can warp."""
        return self.estimator.can_warp

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Binds a copy of the wrapped estimator to each class."""
        super().bind(reference)
        self.parts = {}
        classes = reference.classes
        sizes = (self._bind_one(label, part) for label, part in classes.items())
        title = f"binding {type(self.estimator).__name__} to {len(classes)} classes"
        for _ in with_progress(sizes, len(reference.local.images), title):
            pass
        return self

    def _bind_one(self, label: int, images: ReferenceSet) -> Tensor:
        try:
            self.parts[label] = _copy_apart(self.estimator).bind(images)
        except InputError as error:
            raise InputError(f"class {label}: {error}") from error
        return images.images

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings | None:
        """See `Estimator.holds`; all classes together need about as much memory as the whole set."""
        return self.estimator.holds(N, d, pixels, device)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        raise AssertionError("only the parts estimate")

    def _by_label(self, labels: Tensor | None, answer: Callable[[Estimator, Tensor | slice], Tensor]) -> Tensor:
        """See `Estimator._by_label`; the classes answer in the order of their labels."""
        if labels is None:
            raise InputError("ByClass: labels missing: it needs the class of each z")
        rows = rows_by_label(labels)
        unknown = next((label for label in rows if label not in self.parts), None)
        if unknown is not None:
            raise InputError(f"label {unknown} is none of the {len(self.parts)} classes of the reference set")
        parts = [answer(self.parts[label], own) for label, own in rows.items()]
        return torch.cat(parts)[torch.cat(list(rows.values())).argsort()]


def _copy_apart(estimator: Estimator) -> Estimator:
    """Copy an estimator and its collections, in which it may store results for its class."""
    made = copy.copy(estimator)
    vars(made).update({name: copy.copy(v) for name, v in vars(made).items() if isinstance(v, (dict, list, set))})
    return made
