"""Wrapper that lets any estimator average over the images of each z's class."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor

from lit_knn.deferred_checks import first_of
from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator, Holdings
from lit_knn.estimators.class_passes import DRAWS, MEANS, ClassBatch
from lit_knn.estimators.draws import joined_draws
from lit_knn.estimators.sampled import SampledEstimator
from lit_knn.estimators.values import Check
from lit_knn.guidance import NO_CLASS
from lit_knn.index.base import with_progress
from lit_knn.reference import Reference, ReferenceSet
from lit_knn.reference.classes import rows_by_label
from lit_knn.reference.gathered import fuses
from lit_knn.reference.streaming import batches_of


class ByClass(Estimator):
    """Estimates E[x|z,t,class], the mean over the images of each z's class. `posterior_mean` needs `labels`.

    `bind` binds a copy of the wrapped estimator to each class of the reference set, with its own index. A given count
    such as k must not exceed the size of any class; a default count is reduced to the size of each class.

    On a GPU the classes of a batch are estimated in one pass, without an index, if the wrapped estimator is `Exact`,
    `KNN`, `MonteCarlo`, `STF` or `UniformSNIS`. Then the number of operations does not depend on the number of classes,
    and the search is exact. All others, subclasses and `warped_mean` go class by class, as everything does on a CPU.

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
        self._in_one_pass = type(estimator) in (*MEANS, *DRAWS)

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
        if self._passes(reference.device):
            fuses(reference)
        return self

    def _bind_one(self, label: int, images: ReferenceSet) -> Tensor:
        try:
            part = copied_apart(self.estimator)
            # One pass needs no index of a class. A later search builds it.
            self.parts[label] = Estimator.bind(part, images) if self._passes(images.device) else part.bind(images)
        except InputError as error:
            raise InputError(f"class {label}: {error}") from error
        return images.images

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings | None:
        """See `Estimator.holds`; all classes together need about as much memory as the whole set."""
        held = self.estimator.holds(N, d, pixels, device)
        return Holdings() if held is not None and self._passes(device) else held

    def _passes(self, device: torch.device) -> bool:
        """Tells whether a batch is estimated in one pass on this device."""
        return self._in_one_pass and device.type == "cuda"

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
        if labels is not None and self._passes(z.device):
            if not self.unlabelled:
                return self._check_mean(self._mean_in_one_pass(z, t, x_source, generator, labels), z).to(z.dtype)
            return self._with_unlabelled(z, t, x_source, generator, labels)
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

    def _with_unlabelled(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None, labels: Tensor
    ) -> Tensor:
        """Compute the means of the rows with a class in one pass, and then those of the rows without one."""
        result = torch.empty_like(z)
        for unlabelled in (False, True):
            # This waits for the device, which costs less than the means of all rows over all images.
            rows = ((labels == NO_CLASS) == unlabelled).nonzero()[:, 0]
            if len(rows):
                own, source = (z[rows], t[rows]), None if x_source is None else x_source[rows]
                if unlabelled:
                    mean = self.parts[NO_CLASS]._checked_mean(*own, source, generator, None)
                else:
                    mean = self._check_mean(self._mean_in_one_pass(*own, source, generator, labels[rows]), own[0])
                result[rows] = mean.to(z.dtype)
        return result

    def _mean_in_one_pass(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None, labels: Tensor
    ) -> Tensor:
        """Compute the means of all rows, whatever their classes, in pieces of bounded memory."""
        table, whole, means = self.reference.classes.table(), self.reference.local, []
        which, kind = table.find(labels), type(self.estimator)
        for rows in batches_of(z, table.most):
            source = None if x_source is None else x_source[rows]
            piece = ClassBatch(whole, table, which[rows], z[rows], t[rows], source, generator)
            if kind in MEANS:
                means.append(MEANS[kind](self.estimator, piece))
            else:
                assert self._whole is not None
                means.append(self._whole._average(DRAWS[kind](self.estimator, piece), z[rows], t[rows]))
        return torch.cat(means) if len(means) > 1 else means[0]

    def _more_checks(self, labels: Tensor | None) -> Check | None:
        """Refuse unknown labels where one pass would not notice them."""
        if labels is None or len(labels) == 0 or not self._passes(labels.device):
            return None
        table = self.reference.classes.table()
        unknown = table.labels[table.find(labels)] != labels
        if self.unlabelled:
            unknown &= labels != NO_CLASS
        return Check(unknown.any(), partial(first_of, labels.double(), unknown), self._unknown_label)

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
