"""Wrapper that lets any estimator average over the images of each z's class."""

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator, Holdings
from lit_knn.estimators.draws import joined_draws
from lit_knn.estimators.sampled import SampledEstimator
from lit_knn.guidance import NO_CLASS
from lit_knn.index.base import with_progress
from lit_knn.reference import Reference, ReferenceSet
from lit_knn.reference.classes import rows_by_label


class ByClass(Estimator):
    """Estimates E[x|z,t,class], the mean over the images of each z's class. `posterior_mean` needs `labels`.

    `bind` binds a copy of the wrapped estimator to each class of the reference set, with its own index. A given count
    such as k must not exceed the size of any class; a default count is reduced to the size of each class.

    Args:
        estimator: the estimator to wrap; it is copied.
        unlabelled: also estimate E[x|z,t], over all images, where the label is `NO_CLASS`, as training with label
            dropout needs. `bind` then binds one more copy, to the whole set, with an index of all images.

    Attributes:
        parts: the copies by label; filled by `bind`.

    Raises:
        InputError: the estimator takes labels itself; at `bind`, the set has no labels or is sharded, or the settings
            do not fit a class, which the message names.
    """

    def __init__(self, estimator: Estimator, unlabelled: bool = False) -> None:
        if estimator.knows_classes:
            raise InputError(f"ByClass: {type(estimator).__name__} takes labels itself")
        self.estimator = estimator
        self.unlabelled = unlabelled
        self.deterministic, self.uses_source = estimator.deterministic, estimator.uses_source
        self.parts: dict[int, Estimator] = {}
        self._whole: SampledEstimator | None = None

    @property
    def can_warp(self) -> bool:
        """Tells whether the wrapped estimator can warp."""
        return self.estimator.can_warp

    def by_class(self, unlabelled: bool = False) -> Estimator:
        """See `Estimator.by_class`."""
        return ByClass(self.estimator, unlabelled=True) if unlabelled and not self.unlabelled else self

    def check_levels(self, lowest: float, highest: float) -> None:
        """See `Estimator.check_levels`."""
        self.estimator.check_levels(lowest, highest)

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Binds a copy of the wrapped estimator to each class."""
        super().bind(reference)
        self.parts, self._whole = {}, _averaging(self.estimator, reference)
        classes = reference.classes
        sizes = (self._bind_one(label, part) for label, part in classes.items())
        title = f"binding {type(self.estimator).__name__} to {len(classes)} classes"
        for _ in with_progress(sizes, len(reference.local.images), title):
            pass
        if self.unlabelled:
            self.parts[NO_CLASS] = copied_apart(self.estimator).bind(reference)
        return self

    def _bind_one(self, label: int, images: ReferenceSet) -> Tensor:
        try:
            part = copied_apart(self.estimator)
            self.parts[label] = part.bind(images)
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

    def _checked_mean(
        self,
        z: Tensor,
        t: Tensor,
        x_source: Tensor | None,
        generator: torch.Generator | None,
        labels: Tensor | None,
    ) -> Tensor:
        """Compute the means of an estimator that draws images in one pass; on a CPU the draws go class by class."""
        if self._whole is None:
            return super()._checked_mean(z, t, x_source, generator, labels)
        draws = []
        rows = self._rows(labels)
        for label, own in rows.items():
            source = None if x_source is None else x_source[own]
            part = self.parts[label]
            drawn = part._draw(z[own], t[own], source, generator)  # type: ignore[attr-defined]
            ids = drawn.ids if label == NO_CLASS else self.reference.classes.ids_of(label, drawn.ids)
            draws.append(drawn._replace(ids=ids))
        order = torch.cat(list(rows.values()))
        mu = self._whole._average(joined_draws(draws), z[order], t[order])
        return mu[order.argsort()].to(z.dtype)

    def _unknown_label(self, label: float, where: str = "") -> InputError:
        number = len(self.reference.classes)
        return InputError(f"label {label:.0f} is none of the {number} classes of the reference set{where}")

    def _by_label(self, labels: Tensor | None, answer: Callable[[Estimator, Tensor | slice], Tensor]) -> Tensor:
        """See `Estimator._by_label`; the classes answer in the order of their labels."""
        rows = self._rows(labels)
        parts = [answer(self.parts[label], own) for label, own in rows.items()]
        return torch.cat(parts)[torch.cat(list(rows.values())).argsort()]

    def _rows(self, labels: Tensor | None) -> dict[int, Tensor]:
        """Group the rows of a batch by label."""
        if labels is None:
            raise InputError("ByClass: labels missing: it needs the class of each z")
        rows = rows_by_label(labels)
        unknown = next((label for label in rows if label not in self.parts), None)
        if unknown is not None:
            raise self._unknown_label(unknown)
        return rows


def _averaging(estimator: Estimator, reference: Reference) -> SampledEstimator | None:
    """Copy an estimator onto the whole set, without an index. Returns None if it does not average draws of images."""
    if not isinstance(estimator, SampledEstimator):
        return None
    if type(estimator)._posterior_mean is not SampledEstimator._posterior_mean:
        return None
    whole = copy.copy(estimator)
    whole._reference = reference
    return whole


def copied_apart(estimator: Estimator) -> Estimator:
    """Copy an estimator with its dicts, lists and sets, so that the copies of two classes share no stored results."""
    made = copy.copy(estimator)
    vars(made).update({name: copy.copy(v) for name, v in vars(made).items() if isinstance(v, (dict, list, set))})
    return made
