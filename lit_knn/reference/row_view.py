"""Some rows of a tensor that stays where it is, such as a part of a file that is mapped."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Rows are copied to another device in pieces of about this many bytes.
PIECE_BYTES = 64 * 2**20


class RowView:
    """Some rows of a tensor, without a copy: for a `ReferenceSet` of a part of a mapped file.

    It has those attributes and methods of a tensor that a `ReferenceSet` uses. `view[rows]` copies these rows.

    Args:
        images: (M, *shape), on the CPU.
        rows: (N,) int64, numbers of rows of `images`.
    """

    def __init__(self, images: Tensor, rows: Tensor) -> None:
        self.images = images
        self.rows = rows
        self.shape = torch.Size((len(rows), *images.shape[1:]))
        self.ndim = images.ndim
        self.dtype = images.dtype
        self.device = images.device

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        return self.images[self.rows[index]]

    def numel(self) -> int:
        """Return the number of values."""
        return self.shape.numel()

    def part(self, index: slice | Tensor) -> "RowView":
        """Return a view of some of the rows."""
        return RowView(self.images, self.rows[index])

    def index_select(self, dim: int, ids: Tensor) -> Tensor:
        """Copy the rows of `ids`, (n,). `dim` must be 0, as the images are rows."""
        return self.images.index_select(dim, self.rows[ids])

    def split(self, size: int) -> Iterator[Tensor]:
        """Copy all rows, `size` at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def to(self, device: torch.device) -> "Tensor | RowView":
        """Copy the rows to another device. On the device where they are, the view itself is returned."""
        if device == self.device:
            return self

        moved = torch.empty(self.shape, dtype=self.dtype, device=device)
        size = max(PIECE_BYTES // max(self[:1].nbytes, 1), 1)
        for rows in torch.arange(len(self)).split(size):
            moved[rows[0] : rows[-1] + 1] = self[rows].to(device)
        return moved
