"""Gives a neighbour index the stored images of one process, and searches mirror images with it, too."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lit_knn.common.rng import subset_ids
from lit_knn.index.base import Vectors
from lit_knn.reference.images import chunk_rows, stored_chunks, to_model_space

Find = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(queries (B, d), float32) -> squared distances and ids, (B, k) each."""


def vectors_of(images: Tensor, fingerprint: Callable[[], str], shared: bool) -> Vectors:
    """Return the stored images as vectors in model space, for an index. Mirror images are not among them.

    Args:
        images: (N, *shape), as they are stored.
        fingerprint: returns a name that only these images have.
        shared: whether all processes of a distributed run hold these images.
    """
    d = math.prod(images.shape[1:])

    def chunks() -> Iterator[Tensor]:
        for _, x in stored_chunks(images, chunk_rows(d)):
            yield x.flatten(1)

    def sample(size: int) -> Tensor:
        ids = subset_ids(len(images), size).to(images.device)
        return to_model_space(images[ids].cpu()).flatten(1)

    return Vectors(chunks, sample, len(images), fingerprint, shared)


def search_mirrored(find: Find, z: Tensor, k: int, stored: int) -> tuple[Tensor, Tensor]:
    """Search all images, mirror images included: id i + stored is the mirror image of image i.

    ‖z − mirror(x)‖ = ‖mirror(z) − x‖, so the mirrored images are searched with the mirrored query.

    Args:
        find: searches the stored images.
        z: (B, *shape), model space.
        k: number of neighbours.
        stored: number of stored images.

    Returns:
        `sq_dist` (B, k), ascending, and `ids` (B, k).
    """
    queries = z.flatten(1).float(), z.flip(-1).flatten(1).float()
    if z.is_cuda:
        # A single search reads the vectors only once.
        sq_dist, ids = find(torch.cat(queries))
        plain_sq_dist, mirrored_sq_dist = sq_dist.chunk(2)
        plain_ids, mirrored_ids = ids.chunk(2)
    else:
        plain_sq_dist, plain_ids = find(queries[0])
        mirrored_sq_dist, mirrored_ids = find(queries[1])

    # An id of −1, a place without a neighbour, stays −1.
    mirrored_ids = torch.where(mirrored_ids < 0, mirrored_ids, mirrored_ids + stored)
    all_sq_dist = torch.cat([plain_sq_dist, mirrored_sq_dist], 1)
    all_ids = torch.cat([plain_ids, mirrored_ids], 1)

    sq_dist, order = all_sq_dist.topk(k, dim=1, largest=False, sorted=True)
    return sq_dist, all_ids.gather(1, order)
