"""Batches gathered from a reference set; their order depends only on the seed and the epoch."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.memory import to_device
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.reference import ReferenceSet

Batch = tuple[Tensor, Tensor | None]
"""Images (B, *shape), float32 in model space, and labels (B,) int64 on the CPU, or None."""


def split_batch(batch: object) -> tuple[Tensor, Tensor | None]:
    """Return the images of a batch, (B, *shape), and their labels, (B,), if it has any."""
    if isinstance(batch, Tensor):
        return batch, None
    assert isinstance(batch, Sequence), f"a batch is a tensor or (x, labels), not {type(batch)}"
    return batch[0], batch[1] if len(batch) > 1 else None


def check_step(N: int, batch_size: int, world_size: int, accumulate: int) -> None:
    """Raise InputError if one step of the optimiser would need more images than there are.

    Args:
        N: number of images to train on.
        batch_size: images per batch and rank.
        world_size: number of ranks.
        accumulate: batches of each rank in one step of the optimiser.
    """
    needed = batch_size * world_size * accumulate
    if needed > N:
        times = f" times accumulate_grad_batches={accumulate}" if accumulate > 1 else ""
        step = f"data.batch_size={batch_size}{times} on {world_size} device(s)"
        raise InputError(f"{step} needs {needed} images, the reference set has {N}")


class ReferenceBatches:
    """An iterable of batches. They are gathered on the reference set's device, without workers or host copies.

    The ranks together draw the same images as one rank with `world_size` times the batch size.

    With `shuffle`, an epoch has all N images once, in random order. A step takes `accumulate` batches on every rank,
    and the last images, which do not fill a step, are left out. An iteration has as many batches as an epoch. It starts
    at the batch number `batches_done()`, which may be inside an epoch.

    Without `shuffle`, every iteration has the same `num_images` images, drawn once from the seed. The last batch may be
    smaller, and a remainder that cannot be split evenly over the ranks is left out.

    Args:
        reference: the images.
        batch_size: images per batch and rank.
        seed: sets the order.
        shuffle: see above.
        num_images: number of images over all ranks, without `shuffle`; None, or a number above N, means all N.
        rank: number of this rank.
        world_size: number of ranks.
        accumulate: batches of each rank in one step of the optimiser.
        batches_done: returns the number of batches drawn since training began; called when the first batch of an
            iteration is drawn.
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
        accumulate: int = 1,
        batches_done: Callable[[], int] = lambda: 0,
    ) -> None:
        self.reference = reference
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._global_batch_size = batch_size * world_size
        self._batches_done = batches_done
        N = reference.N
        # The number of images in an iteration is a multiple of `unit`.
        unit = world_size
        if shuffle:
            check_step(N, batch_size, world_size, accumulate)
            unit = self._global_batch_size * accumulate
        elif num_images is not None:
            N = min(num_images, N)

        self._num_ids = N - N % unit
        if self._num_ids == 0:
            raise InputError(f"{N} image(s) cannot be split over {world_size} device(s)")

    def __len__(self) -> int:
        # The quotient is rounded up.
        return -(-self._num_ids // self._global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # This line runs when the first batch is drawn. At the call of iter() it would be too early, because Lightning
        # corrects the progress that a checkpoint stores only afterwards.
        epoch, first = divmod(self._batches_done(), len(self))
        yield from self._of_epoch(epoch, range(first, len(self)))
        yield from self._of_epoch(epoch + 1, range(first))

    def _of_epoch(self, epoch: int, batches: range) -> Iterator[Batch]:
        """Yield the batches of an epoch that have these numbers."""
        key: tuple[int, ...] = (Stream.VALIDATION_ORDER, self.seed)
        if self.shuffle:
            key = (Stream.TRAINING_ORDER, self.seed, epoch)
        generator = keyed_generator("cpu", *key)
        order = torch.randperm(self.reference.N, device="cpu", generator=generator)
        order = order[: self._num_ids]

        # One copy for an epoch, because a copy for each batch would wait for the GPU.
        on_device = to_device(order, self.reference.device)
        labels = self.reference.labels
        for number in batches:
            start = number * self._global_batch_size
            # The ranks take turns at the images of a global batch.
            of_rank = slice(start + self.rank, start + self._global_batch_size, self.world_size)
            # The reference set may have moved to another device since the epoch began.
            x = self.reference.take(on_device[of_rank].to(self.reference.device))
            yield x, None if labels is None else labels[order[of_rank]]

    def state_dict(self) -> dict[str, int]:
        """Return no state, because `batches_done` gives the position. Lightning can resume only with this method."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing, because there is no state."""


class SeedBatches:
    """Batches of this rank's seeds, int64, from 0 to num_seeds − 1. Rank r has the seeds r, r + world_size, ..."""

    def __init__(self, num_seeds: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if num_seeds < world_size:
            rule = f"must be at least the number of devices, {world_size}"
            raise InputError(f"data.predict_samples={num_seeds} {rule}")
        self._batches = torch.arange(rank, num_seeds, world_size).split(batch_size)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)
