"""The classes of a reference set: rows grouped by label, and one reference set per class."""

from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.reference.reference_set import ReferenceSet


def classes_of(reference: ReferenceSet) -> dict[int, ReferenceSet]:
    """Return one reference set per class, by ascending label. The whole set keeps them, and moves them when it moves.

    The images of a class are a view if they are consecutive, as in data sorted by class. Otherwise they are copied, and
    all classes together take as much memory as the set itself. Each class has its own index, with the settings of the
    set's index.
    """
    labels = reference.labels
    if reference.sharded:
        advice = "set data.sharded to false"
        raise InputError(f"a sharded reference set cannot be split by class: {advice}")
    if labels is None:
        raise InputError("the reference set has no labels, so it has no classes")
    if reference.classes is None:
        # The labels of mirror images, which come last, are left out: each class mirrors its images itself.
        rows = rows_by_label(labels[: len(reference.images)])
        classes = {}
        for label, rows_of_class in rows.items():
            classes[label] = reference.subset(_as_slice(rows_of_class), label)
        reference.classes = classes
    return reference.classes


def rows_by_label(labels: Tensor) -> dict[int, Tensor]:
    """Group the rows of `labels` (B,): a dict from label to rows, (b,) int64, both ascending."""
    order = labels.argsort(stable=True)
    present, counts = labels[order].unique_consecutive(return_counts=True)
    rows = order.split(counts.tolist())
    return dict(zip(present.tolist(), rows, strict=True))


def _as_slice(rows: Tensor) -> Tensor | slice:
    """Turn ascending rows (b,) into a slice if they are consecutive, because a slice indexes without a copy."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def lie_together(labels: Tensor) -> bool:
    """Return whether the rows of each label are consecutive in `labels` (B,)."""
    return len(labels.unique_consecutive()) == len(labels.unique())
