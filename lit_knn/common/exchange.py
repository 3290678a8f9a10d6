"""Exchanges tensors and numbers between the ranks of a distributed run."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lit_knn.common.distributed import is_alone, rank_and_size
from lit_knn.common.memory import to_device

if TYPE_CHECKING:
    from lit_knn.common.distributed import Group


class Exchange:
    """Collective operations on tensors. Only the first dimension may differ between ranks.

    Every rank must call the methods in the same order, with tensors on the device of the torch.distributed backend
    (gloo: CPU; NCCL: GPU). Without a distributed run there is one rank, and it sends nothing.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank_and_size()
        # Bytes that this rank has sent, without the row counts (8 bytes per rank and call).
        self.bytes_sent = 0

    def agree_on_rows(self, sent: Tensor) -> tuple[list[int], list[int]]:
        """Exchange row counts: `sent`, (size,) int64, has the number of rows for each rank.

        Returns the numbers of rows sent to and received from each rank.
        """
        received = sent.clone()
        if self.size > 1:
            dist.all_to_all_single(received, sent)

        sent_rows, received_rows = torch.stack([sent, received]).tolist()
        return sent_rows, received_rows

    def move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to the ranks and return the received rows, without waiting for the device.

        Args:
            rows: (sum of `sent`, ...), in the order of the ranks.
            sent: number of rows for each rank.
            received: number of rows from each rank.
        """
        if self.size == 1:
            return rows

        # A rank's rows for itself are not sent. The slice gives the size of a row, also if there is none.
        self.bytes_sent += (len(rows) - sent[self.rank]) * rows[:1].numel() * rows.element_size()
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    def all_gather(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of each rank, in the order of the ranks."""
        if self.size == 1:
            return [rows]

        counts = to_device(torch.full((self.size,), len(rows)), rows.device)
        sent, received = self.agree_on_rows(counts)
        # Each rank is sent a copy of all rows.
        gathered = self.move(torch.cat([rows] * self.size), sent, received)
        return list(gathered.split(received))

    def of_first(self, values: Tensor) -> Tensor:
        """Return the first rank's values on every rank. All ranks must give tensors of one shape."""
        # The other ranks send no rows.
        return self.all_gather(values if self.rank == 0 else values[:0])[0]

    def sum(self, values: Tensor) -> Tensor:
        """Sum tensors of one shape over the ranks. The result is the same on each rank, bit for bit."""
        return torch.stack(self.all_gather(values.unsqueeze(0))).sum(0).squeeze(0)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors (B, ...) of any types to bytes (B, b), uint8, so that one collective sends them all."""
    parts = []
    for tensor in tensors:
        # The size −1 would be ambiguous for a tensor without rows.
        rows = tensor.reshape(len(tensor), math.prod(tensor.shape[1:])).contiguous()
        parts.append(rows.view(torch.uint8))
    return torch.cat(parts, dim=1)


def unpacked(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `packed`: make tensors (B, ...) from rows (B, b), uint8.

    The tensors have the types and the other dimensions of those in `like`.
    """
    sizes = [math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in like]
    tensors = []
    for part, tensor in zip(rows.split(sizes, dim=1), like, strict=True):
        # A copy starts at an address that is aligned for every type.
        aligned = part.clone(memory_format=torch.contiguous_format)
        shape = (len(rows), *tensor.shape[1:])
        tensors.append(aligned.view(tensor.dtype).reshape(shape))
    return tensors


def cpu_group() -> "Group":
    """Make a group for `all_reduce_max`, which exchanges numbers on the CPU, so that no GPU waits.

    All processes must call this.
    """
    if is_alone() or dist.get_backend() == "gloo":
        return None
    return cast("Group", dist.new_group(backend="gloo"))


def all_reduce_max(values: Sequence[int], group: "Group") -> list[int]:
    """Return the maximum of each value over all processes.

    All processes must call this, with a group from `cpu_group`.
    """
    if is_alone():
        return list(values)

    each = torch.tensor(values)
    dist.all_reduce(each, dist.ReduceOp.MAX, group)
    return each.tolist()


def leave(group: "Group") -> None:
    """Close a group from `cpu_group`. A process that ends with an open group may abort."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
