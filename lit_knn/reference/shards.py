"""The shards of a reference set: which images each rank holds, and what each rank knows about those of the others."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lit_knn.common.distributed import in_every_process
from lit_knn.common.errors import InputError
from lit_knn.reference.images import expand_labels
from lit_knn.reference.reference_set import ReferenceSet


def shard_rows(N: int, rank: int, size: int) -> slice:
    """Return the images of one rank, when all images are split evenly over the ranks.

    Args:
        N: number of images.
        rank: number of the rank.
        size: number of ranks.
    """
    return slice(N * rank // size, N * (rank + 1) // size)


class Shard(NamedTuple):
    """What each rank tells the others about its images."""

    kind: str  # shape, type and options, which must be the same on all ranks
    stored: int  # number of images
    labels: np.ndarray | None  # (stored,)
    largest: float  # upper bound of the absolute values


def agree_on_shards(local: ReferenceSet) -> list[Shard]:
    """Return the shards of all ranks. Raises InputError if they differ in more than their images.

    All ranks must call this function.
    """
    has_labels = local.labels is not None
    kind = f"{local.shape} {local.images.dtype} hflip={local.hflip} labels={has_labels}"
    stored = len(local.images)
    labels = None if local.labels is None else local.labels[:stored].numpy()
    shards = in_every_process(lambda: Shard(kind, stored, labels, local.largest))

    first = shards[0].kind
    for rank, shard in enumerate(shards):
        if shard.kind != first:
            difference = f"rank 0 has images {first}, rank {rank} {shard.kind}"
            raise InputError(f"the shards differ: {difference}")
    return shards


def labels_of_all(shards: Sequence[Shard], hflip: bool) -> Tensor | None:
    """Return the labels of the images of all shards, mirrored ones included, (N,) int64; or None."""
    parts = [shard.labels for shard in shards if shard.labels is not None]
    if not parts:
        return None
    stored = sum(shard.stored for shard in shards)
    return expand_labels(np.concatenate(parts), stored, hflip)
