"""The classes of a reference set: rows grouped by label, and one reference set per class."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lit_knn.errors import InputError

if TYPE_CHECKING:
    from lit_knn.reference.reference_set import ReferenceSet


class ClassTable(NamedTuple):
    """The images of each class as tensors on the device of the set, so that a batch finds them without a loop.

    The C classes are in the order of their labels. A mirrored image follows all images of its class that are stored.

    Attributes:
        labels: (C,), int64, ascending.
        rows: stored images by ascending label, int64.
        starts: (C,), position in `rows` of the first image of each class.
        sizes: (C,), number of images of each class, mirrored ones included.
        most: the largest of `sizes`.
        stored: number of stored images in the set.
        mirrored: whether mirrored images count.
    """

    labels: Tensor
    rows: Tensor
    starts: Tensor
    sizes: Tensor
    most: int
    stored: int
    mirrored: bool

    def find(self, labels: Tensor) -> Tensor:
        """Return the position of the class of each label, (B,); any position if the label is unknown."""
        return torch.searchsorted(self.labels, labels).clamp_(max=len(self.labels) - 1)

    def ids_of(self, which: Tensor, places: Tensor) -> Tensor:
        """Return ids in the whole set, (B, n), of the images at `places` (B, n) of classes (B,); any id beyond a class.

        A place is a number from 0 to the size of the class − 1.
        """
        starts = self.starts[which].unsqueeze(1)
        if not self.mirrored:
            return self.rows[(starts + places).clamp_(max=self.stored - 1)]
        half = (self.sizes[which] // 2).unsqueeze(1)
        turned = places >= half
        row = self.rows[(starts + places - turned * half).clamp_(max=self.stored - 1)]
        return row + turned * self.stored


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

    def table(self) -> ClassTable:
        """Return all classes as tensors on the device of the set. They are computed once per device."""
        return self._reference.cached("class table", self._table)

    def _table(self) -> ClassTable:
        assert self._reference.labels is not None
        stored, factor = len(self._reference.images), 2 if self._reference.hflip else 1
        labels = self._reference.labels[:stored].cpu()
        rows, found = labels.argsort(stable=True), torch.tensor(list(self._rows))
        sizes = torch.bincount(torch.searchsorted(found, labels), minlength=len(found))
        most, device = factor * int(sizes.max()), self._reference.device
        starts = sizes.cumsum(0) - sizes
        found, rows, starts, sizes = (part.to(device) for part in (found, rows, starts, factor * sizes))
        return ClassTable(found, rows, starts, sizes, most, stored, factor == 2)

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
