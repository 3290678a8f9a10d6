"""Images drawn for each z: they are merged, and gathered in pieces that fit into memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_knn.common.memory import GPU_FACTOR
from lit_knn.reference import ReferenceSet
from lit_knn.reference.gathered import Gathered, Images, Stored, stays_stored
from lit_knn.theory.warp import Warp

# Bytes of float32 images that are gathered at a time on a CPU. Passes over the images are fastest if this number is
# near the size of the CPU's cache.
GATHER_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Images drawn for each z. Their weights are likelihoods times a factor, normalised.

    Attributes:
        ids: (B, p). Unused places, which come last, hold any ids.
        log_factor: (B, p), or (B, 1 + p) with a source, float64: logarithm of the factor that multiplies the
            likelihood; −inf at unused places.
        source: (B, *shape), one more image per z, placed before the drawn images; or None.
        copies: (B, p), float64, number of independent draws that a place stands for; None if always 1.
        of_posterior: whether the images are draws from the posterior; then the weights are only the factor.
    """

    ids: Tensor
    log_factor: Tensor
    source: Tensor | None = None
    copies: Tensor | None = None
    of_posterior: bool = False


def drawn_images(
    reference: ReferenceSet, draws: Draws, warp: Warp | None = None
) -> Iterator[tuple[Tensor, Images]]:
    """Yield rows (b,) and their images, in bounded memory, in any order.

    On CUDA the images stay in the set if they can. A sharded set first fetches all images at once, each image once.
    """
    ids = draws.ids
    used = used_places(draws)
    if reference.sharded:
        # Unused places get the first image of the row, which is fetched anyway.
        place = torch.arange(ids.shape[1], device=ids.device)
        ids = torch.where(place < used.unsqueeze(1), ids, ids[:, :1])

    local, ids = reference.fetch(ids)
    if warp is None and stays_stored(local):
        yield torch.arange(len(ids), device=ids.device), Stored(local, ids, draws.source)
        return

    if not ids.is_cuda:
        # The C library returns memory to the system once the free memory exceeds twice the largest array freed so far.
        # New pages for each piece would take as long as the sums. So free a larger array first, without writing to it.
        torch.empty(6 * GATHER_BYTES, dtype=torch.uint8)

    for rows, places in pieces(used, ids.shape[1], reference.d):
        x = local.take(ids[rows, :places])
        if draws.source is not None:
            source = draws.source[rows].unsqueeze(1)
            x = torch.cat([source.to(x.dtype), x], 1)
        yield rows, Gathered(x, None if warp is None else warp.rows(rows))


def used_places(draws: Draws) -> Tensor:
    """Count the places of each row up to the last one that is used, (B,)."""
    B, p = draws.ids.shape
    if p == 0:
        return draws.ids.new_zeros(B)

    is_used = draws.log_factor[:, -p:] > -torch.inf
    place = torch.arange(p, device=draws.ids.device)
    return (is_used * (place + 1)).amax(1)


def pieces(used: Tensor, p: int, d: int) -> Iterator[tuple[Tensor, int]]:
    """Yield rows with similar numbers of used places, and the largest of these numbers.

    The images of a piece take at most `GATHER_BYTES`. On a GPU all p places count, because the host would wait for
    their number. An empty batch has one empty piece, so that callers can join the results.

    Args:
        used: (B,), see `used_places`.
        p: places of each row.
        d: dimension of an image.
    """
    B = len(used)
    order = used.argsort()
    images = GATHER_BYTES // (4 * d)
    if used.is_cuda:
        sizes = [p] * B
        images = GPU_FACTOR * GATHER_BYTES // (4 * d)
    else:
        sizes = used[order].tolist()

    if B == 0:
        yield order, p
    start = 0
    while start < B:
        stop = start + 1
        while (
            stop < B
            and sizes[stop] <= 2 * sizes[start]
            and (stop + 1 - start) * sizes[stop] <= images
        ):
            stop += 1
        yield order[start:stop], sizes[stop - 1]
        start = stop


def merged(ids: Tensor, log_factor: Tensor, of_posterior: bool = False) -> Draws:
    """Merge repeated images of independent draws, to gather each image once. At small t all draws are the same image.

    `ids` is (B, n); `log_factor` is (B, n), float64, and equal for equal ids; `of_posterior` is as in `Draws`.
    """
    # It rereads an image from its cache, which is faster than finding the repetitions.
    if ids.is_cuda:
        return Draws(ids=ids, log_factor=log_factor, of_posterior=of_posterior)
    ids, order = ids.sort(1)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = new.cumsum(1) - 1
    copies = torch.zeros_like(log_factor).scatter_add_(1, place, torch.ones_like(log_factor))
    log_factor = log_factor.scatter(1, place, log_factor.gather(1, order)) + copies.log()
    return Draws(
        ids=ids.scatter(1, place, ids),
        log_factor=log_factor,
        copies=copies,
        of_posterior=of_posterior,
    )


class ResultRows:
    """Results of pieces, put into the order of all rows, each piece as soon as it comes.

    Pieces that wait would lie between the gathered images in memory, and each piece would need new pages.

    Attributes:
        columns: the results of all rows, (count, ...) each.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.columns: list[Tensor] = []

    def put(self, rows: Tensor, *parts: Tensor) -> None:
        """Put the results of the rows (b,), which are (b, ...) each."""
        if not self.columns:
            for part in parts:
                self.columns.append(part.new_empty(self.count, *part.shape[1:]))

        for column, part in zip(self.columns, parts, strict=True):
            column[rows] = part
