"""The latest samples of a generator, as a reference set for an estimator."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.exchange import Exchange


@dataclass(frozen=True)
class Samples:
    """Samples (M, *shape) float32, the oldest first, and their labels (M,) int64 on the CPU, or None."""

    images: Tensor
    labels: Tensor | None

    def followed_by(self, other: "Samples", size: int) -> "Samples":
        """Return the last `size` of these samples followed by the others."""
        # Samples of a checkpoint are on the CPU.
        images = torch.cat([self.images.to(other.images.device), other.images])[-size:]
        if self.labels is None or other.labels is None:
            return Samples(images, None)
        return Samples(images, torch.cat([self.labels, other.labels])[-size:])

    def check_has_classes_of(self, labels: Tensor | None) -> None:
        """Raise InputError if a class of labels (B,) has no sample."""
        if labels is None or self.labels is None:
            return
        missing = set(labels.tolist()) - set(self.labels.tolist())
        if missing:
            problem = f"the bank of {len(self.labels)} samples has none of class {min(missing)}"
            raise InputError(f"{problem}: raise bank_size")


def labels_in_proportion(ascending: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draw labels, (number,) int64, of which each class has its share up to one, in random order. All is on the CPU.

    Args:
        ascending: (N,) int64, the sorted labels of the data.
        number: number of labels.
        generator: source of randomness.
    """
    start = torch.rand((), generator=generator, dtype=torch.float64)
    places = (torch.arange(number) + start) * (len(ascending) / number)
    labels = ascending[places.long().clamp(max=len(ascending) - 1)]
    return labels[torch.randperm(number, generator=generator)]


class SampleBank:
    """Keeps the latest samples over all batches and ranks, in the order in which they were made.

    All ranks have the same bank: each gets the samples of all ranks, in the order of the ranks. So the checkpoint of
    one rank serves all. A batch may be interrupted and repeated, so the bank remembers its samples before the last
    batch, too.

    Args:
        size: the most samples.
    """

    def __init__(self, size: int) -> None:
        check_at_least(1, bank_size=size)
        self.size = size
        self.samples: Samples | None = None
        self._before: Samples | None = None
        # The number of the batch that made the last samples.
        self._batch = -1

    def joined(self, images: Tensor, labels: Tensor | None) -> Samples:
        """Return the bank's samples followed by others, the last `size` of them. The bank stays the same.

        Args:
            images: (B, *shape), without gradient.
            labels: (B,) int64, or None.
        """
        new = Samples(images.float(), None if labels is None else labels.cpu())
        return new if self.samples is None else self.samples.followed_by(new, self.size)

    def add(self, images: Tensor, labels: Tensor | None, batch: int, gather: bool = True) -> int:
        """Add the samples of a batch of every rank, and return their number. All ranks must call it.

        Args:
            images: (B, *shape), of this rank, without gradient.
            labels: (B,) int64, or None.
            batch: number of the batch.
            gather: False adds only those of this rank, which need not wait for the others.
        """
        if batch != self._batch:
            self._before = self.samples
            self._batch = batch

        if gather:
            exchange = Exchange()
            images = torch.cat(exchange.all_gather(images.contiguous()))
            if labels is not None:
                labels = torch.cat(exchange.all_gather(labels.to(images.device)))
        self.samples = self.joined(images, labels)
        return len(images)

    @torch.no_grad()
    def renew(
        self,
        make: Callable[[int], tuple[Tensor, Tensor | None]],
        number: int,
        batch: int,
        gather: bool = True,
    ) -> Samples:
        """Add new samples, fill the bank if it is empty, and return all. All ranks must call it.

        Args:
            make: maps 1, 2, … to new samples, (B, *shape), and their labels, (B,) int64 or None.
            number: number of new samples, over all ranks, rounded up to whole batches.
            batch: number of the batch.
            gather: see `add`.
        """
        missing = self.size if self.samples is None else number
        calls = 0
        while missing > 0:
            calls += 1
            images, labels = make(calls)
            missing -= self.add(images, labels, batch, gather)
        assert self.samples is not None
        return self.samples

    def content(self, batches_done: int) -> Content:
        """Return the samples of all whole batches for a checkpoint.

        Args:
            batches_done: number of whole batches. The next batch may have been interrupted.
        """
        samples = self.samples if self._batch < batches_done else self._before
        if samples is None:
            return {}
        content: Content = {"images": samples.images.cpu()}
        if samples.labels is not None:
            content["labels"] = samples.labels
        return content

    def restore(self, content: Content) -> None:
        """Take the samples of a checkpoint, as `content` returned them."""
        self._before, self._batch = None, -1
        self.samples = None
        if content:
            images = content["images"][-self.size :]
            labels = content.get("labels")
            self.samples = Samples(images, None if labels is None else labels[-self.size :])
