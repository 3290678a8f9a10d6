"""What the ranks of a distributed run send each other while they share one reference set."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Collective operations on tensors whose first dimension may differ between ranks; the others must not.

    Every rank must call each of them, in the same order, with tensors on the device that the backend of
    torch.distributed sends from (gloo: CPU; NCCL: GPU). Without a distributed run there is one rank, which sends
    nothing.

    Attributes:
        rank: of this process.
        size: number of ranks.
        bytes_sent: by this rank to others so far, but for the numbers of rows, 8 bytes for each rank and call.
    """

    def __init__(self) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.size = dist.get_world_size() if distributed else 1
        self.bytes_sent = 0

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send part r to rank r; returns what each rank has sent to this one, in the order of the ranks."""
        if self.size == 1:
            return list(parts)
        sent = torch.tensor([len(part) for part in parts], device=parts[0].device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent_rows, received_rows = sent.tolist(), received.tolist()
        rows = torch.cat(list(parts))
        self.bytes_sent += (len(rows) - sent_rows[self.rank]) * rows[:1].numel() * rows.element_size()
        out = rows.new_empty(sum(received_rows), *rows.shape[1:])
        dist.all_to_all_single(out, rows, received_rows, sent_rows)
        return list(out.split(received_rows))

    def all_gather(self, rows: Tensor) -> list[Tensor]:
        """The rows of each rank, in the order of the ranks."""
        return self.all_to_all([rows] * self.size)

    def of_first(self, values: Tensor) -> Tensor:
        """The values that the first rank has, of equal shapes."""
        return self.all_to_all([values if self.rank == 0 else values[:0]] * self.size)[0]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, of equal shapes, the same to the last bit on each."""
        return torch.stack(self.all_gather(values.unsqueeze(0))).sum(0).squeeze(0)
