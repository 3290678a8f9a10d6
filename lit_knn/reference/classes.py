"""Rows grouped by their class labels."""

from torch import Tensor


def rows_by_label(labels: Tensor) -> dict[int, Tensor]:
    """The rows of each label that occurs in `labels` (B,): (b,) int64 each, ascending; labels ascending."""
    order = labels.argsort(stable=True)
    found, counts = labels[order].unique_consecutive(return_counts=True)
    return dict(zip(found.tolist(), order.split(counts.tolist()), strict=True))


def as_slice(rows: Tensor) -> Tensor | slice:
    """Ascending rows (b,) as a slice where they are consecutive, for which indexing gives a view and no copy."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def lie_together(labels: Tensor) -> bool:
    """Whether the rows of each label follow each other in `labels` (B,)."""
    return len(labels.unique_consecutive()) == len(labels.unique())
