"""Batches gathered from a reference set, in an order that depends on the seed and the epoch alone."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.reference import ReferenceSet
from lit_knn.rng import keyed_generator

# First key of the streams, so that neither shares its draws with the other or with anything seeded by (seed, step).
TRAINING_ORDER = 0x747261696E
VALIDATION_ORDER = 0x76616C6964


class ReferenceBatches:
    """An iterable of `(x, labels)` gathered where the reference set is; no workers, nothing is copied to the host.

    `x` is (batch_size, *shape), float32, model space; `labels` is (batch_size,), int64, or None. The batches of
    `world_size` ranks together are those that one rank with `world_size` times the batch size would draw.

    With `shuffle`, an epoch is a random order of all N images in which each comes once; what does not fill a batch on
    every rank is left out. An iteration gives as many batches as an epoch has, going on where `batches_done` says, in
    mid-epoch too. Without `shuffle`, every iteration gives the same `num_images` images, drawn once from the seed;
    the last batch may be smaller, and only what cannot be split evenly over the ranks is left out.

    Args:
        reference: the reference set.
        batch_size: images per batch on this rank.
        seed: the order is a function of it and the epoch, the same on all ranks.
        shuffle: True for training epochs, False for a fixed subset.
        num_images: size of the fixed subset over all ranks, at most N of which are used; None for all N.
        rank: this process.
        world_size: number of processes.
        batches_done: gives the number of batches drawn since the first epoch began, on which a resumed run goes on;
            asked when the first batch of an iteration is drawn.

    Raises:
        InputError: batch_size < 1, or fewer images than one batch on every rank (one image, without `shuffle`).
    """

    def __init__(
        self,
        reference: ReferenceSet,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        num_images: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        batches_done: Callable[[], int] = lambda: 0,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"data.batch_size must be at least 1, got {batch_size}")
        self.reference = reference
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._global_batch_size = batch_size * world_size
        self._batches_done = batches_done
        N = reference.N if shuffle or num_images is None else min(num_images, reference.N)
        unit = self._global_batch_size if shuffle else world_size
        self._num_ids = N - N % unit
        if self._num_ids == 0 and shuffle:
            raise InputError(
                f"data.batch_size={batch_size} on {world_size} device(s) needs {self._global_batch_size} images, the "
                f"reference set has {N}"
            )
        if self._num_ids == 0:
            raise InputError(f"{N} image(s) cannot be split over {world_size} devices")

    def __len__(self) -> int:
        """Batches of one epoch on each rank."""
        return -(-self._num_ids // self._global_batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        # A generator, so that `batches_done` is read when the first batch is drawn: Lightning calls iter() before it
        # has corrected the progress it loads from a checkpoint.
        epoch, first = divmod(self._batches_done(), len(self))
        for batches in (range(first, len(self)), range(first)):
            order = self._order(epoch)
            for batch_idx in batches:
                yield self._gather(order, batch_idx)
            epoch += 1

    def _order(self, epoch: int) -> Tensor:
        key = (TRAINING_ORDER, self.seed, epoch) if self.shuffle else (VALIDATION_ORDER, self.seed)
        return torch.randperm(self.reference.N, generator=keyed_generator("cpu", *key))[: self._num_ids]

    def _gather(self, order: Tensor, batch_idx: int) -> tuple[Tensor, Tensor | None]:
        start = batch_idx * self._global_batch_size
        ids = order[start : start + self._global_batch_size][self.rank :: self.world_size].to(self.reference.device)
        labels = self.reference.labels
        return self.reference.gather(ids), None if labels is None else labels[ids]

    def state_dict(self) -> dict[str, int]:
        """Nothing: the position follows from `batches_done`. Tells Lightning that this can be resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """See `state_dict`."""
