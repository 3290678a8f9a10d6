"""The classes of a reference set: rows grouped by label, and one reference set per class."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.reference.reference_set import ReferenceSet


class ClassSets(Mapping[int, ReferenceSet]):
    """One reference set per class, by ascending label. A set is made at its first use.

    The images of a class are a view if they are consecutive, as in data sorted by class. Otherwise they are copied, and
    all classes together take as much memory as the set itself. Each class has its own index, with the settings of the
    set's index.
    """

    def __init__(self, reference: ReferenceSet, labels: Tensor) -> None:
        self._reference = reference
        self._rows = {label: _as_slice(rows) for label, rows in rows_by_label(labels[: len(reference.images)]).items()}
        self._sets: dict[int, ReferenceSet] = {}

    def __getitem__(self, label: int) -> ReferenceSet:
        if label not in self._sets:
            self._sets[label] = self._reference.subset(self._rows[label], label)
        return self._sets[label]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def to(self, device: torch.device) -> None:
        """Move the sets that exist. The caller must move the whole set first."""
        for label, made in self._sets.items():
            made.to(device)
            if isinstance(rows := self._rows[label], slice):
                made.images = self._reference.images[rows]  # A view uses no memory of its own.


def classes_of(reference: ReferenceSet) -> ClassSets:
    """Return one reference set per class, by label. The whole set keeps these sets and moves them to its device."""
    labels = reference.labels
    if reference.sharded:
        raise InputError("a sharded reference set cannot be split by class: set data.sharded to false")
    if labels is None:
        raise InputError("the reference set has no labels, so it has no classes")
    if reference.classes is None:
        reference.classes = ClassSets(reference, labels)
    return reference.classes


def rows_by_label(labels: Tensor) -> dict[int, Tensor]:
    """Group the rows of `labels` (B,): a dict from label to rows, (b,) int64, both ascending."""
    order = labels.argsort(stable=True)
    found, counts = labels[order].unique_consecutive(return_counts=True)
    return dict(zip(found.tolist(), order.split(counts.tolist()), strict=True))


def _as_slice(rows: Tensor) -> Tensor | slice:
    """Turn ascending rows (b,) into a slice if they are consecutive, because a slice indexes without a copy."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def lie_together(labels: Tensor) -> bool:
    """Return whether the rows of each label are consecutive in `labels` (B,)."""
    return len(labels.unique_consecutive()) == len(labels.unique())
