"""The classes of a reference set: rows grouped by label, and one reference set per class."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_knn.errors import InputError

if TYPE_CHECKING:
    from lit_knn.reference.reference_set import ReferenceSet


class ClassSets(Mapping[int, "ReferenceSet"]):
    """One reference set per class, by ascending label. Each set is made when it is first used.

    The images of a class are a view if they follow each other, as in data sorted by class. Otherwise they are copied,
    so that all classes together take as much memory as the set itself. Each class has its own index, with the settings
    of the set's index.

    Raises:
        InputError: the set has no labels; at a look-up, the set does not have this label.
    """

    def __init__(self, reference: "ReferenceSet") -> None:
        if reference.labels is None:
            raise InputError("the reference set has no labels, so it has no classes")
        self._reference = reference
        rows = rows_by_label(reference.labels[: len(reference.images)].cpu())
        self._rows = {label: as_slice(own) for label, own in rows.items()}
        self._sets: dict[int, ReferenceSet] = {}
        self._told: set[str] = set()

    def __getitem__(self, label: int) -> "ReferenceSet":
        if label not in self._sets:
            rows = self._rows.get(label)
            if rows is None:
                raise InputError(f"label {label} is none of the {len(self)} classes of the reference set")
            made = self._reference.subset(rows, label, self._sha256(rows))
            made.told = self._told
            self._sets[label] = made
        return self._sets[label]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def ids_of(self, label: int, ids: Tensor) -> Tensor:
        """Turn ids in the set of a class into ids in the whole set, of any shape."""
        rows, stored = self._rows[label], len(self._sets[label].images)
        row = ids % stored
        own = row + rows.start if isinstance(rows, slice) else rows.to(ids.device)[row]
        return own + (ids >= stored) * len(self._reference.images)

    def to(self, device: torch.device) -> None:
        """Move the sets that exist. The whole set must have moved before."""
        for label, made in self._sets.items():
            made.to(device)
            if isinstance(rows := self._rows[label], slice):
                made.images = self._reference.images[rows]  # A view uses no memory of its own.

    def _sha256(self, rows: Tensor | slice) -> str | None:
        """Hash these rows by the given hash of all images, without reading images. None if no hash was given."""
        given = self._reference.given_sha256
        if given is None:
            return None
        which = str(rows).encode() if isinstance(rows, slice) else rows.numpy()
        return hashlib.sha256(given.encode() + bytes(which)).hexdigest()


def rows_by_label(labels: Tensor) -> dict[int, Tensor]:
    """Group the rows of `labels` (B,): a dict from label to rows, (b,) int64, both ascending."""
    order = labels.argsort(stable=True)
    found, counts = labels[order].unique_consecutive(return_counts=True)
    return dict(zip(found.tolist(), order.split(counts.tolist()), strict=True))


def as_slice(rows: Tensor) -> Tensor | slice:
    """Turn ascending rows (b,) into a slice if they are consecutive, because a slice indexes without a copy."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def lie_together(labels: Tensor) -> bool:
    """Tells whether the rows of each label are consecutive in `labels` (B,)."""
    return len(labels.unique_consecutive()) == len(labels.unique())
