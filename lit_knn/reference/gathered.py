"""The drawn images of a batch: copied in pieces that fit a processor's cache, or read where they are stored on CUDA."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.common.errors import first_line
from lit_knn.common.memory import GPU_FACTOR
from lit_knn.reference.images import images_of
from lit_knn.reference.reference_set import ReferenceSet
from lit_knn.theory.posterior import direct_sq_dist
from lit_knn.theory.snis import centred_sum, weighted_deviation
from lit_knn.theory.warp import Warp

# Bytes of float32 images that are gathered at a time on a CPU. Passes over the images are fastest if this number is
# near the size of the CPU's cache.
GATHER_BYTES = 4 * 2**20


class Gathered(NamedTuple):
    """Drawn images that were copied from the set."""

    x: Tensor  # (b, p, *shape), float32, the images of each row
    warp: Warp | None = None  # maps that are applied to the images before distances are measured

    @property
    def places(self) -> int:
        """Number of images per row, p."""
        return self.x.shape[1]

    def sq_dist(self, z: Tensor) -> Tensor:
        """Return ‖z − x‖² from each z (b, *shape) to its images: (b, p), float64."""
        return direct_sq_dist(z, self.x if self.warp is None else self.warp.apply(self.x))

    def mean(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i x_i, (b, *shape), for weights (b, p) whose rows sum to 1."""
        return centred_sum(weights, self.x)

    def deviation(self, weights: Tensor, centre: Tensor) -> Tensor:
        """Return Σ_i w_i (x_i − c), (b, *shape), for weights (b, p) and the centre c (b, *shape)."""
        return weighted_deviation(weights, self.x, centre)


class Stored(NamedTuple):
    """Drawn images that stay in a set on CUDA. Each method, as in `Gathered`, reads every image once."""

    reference: ReferenceSet
    ids: Tensor  # (b, n), the images of each row
    source: Tensor | None = None  # (b, *shape), one more image of each row, placed first

    @property
    def places(self) -> int:
        return self.ids.shape[1] + (self.source is not None)

    def sq_dist(self, z: Tensor) -> Tensor:
        sq_dist = compiled(stored_sq_dist)(self.reference.images, self.reference.hflip, self.ids, z)
        if self.source is None:
            return sq_dist
        # The source has the first column.
        return torch.cat([direct_sq_dist(z, self.source.unsqueeze(1)), sq_dist], 1)

    def mean(self, weights: Tensor) -> Tensor:
        centre = self.source
        if centre is None:
            # Rounding errors scale with the distance from this image, as in `centred_sum`.
            likeliest = self.ids.gather(1, weights.argmax(1, keepdim=True))
            centre = self.reference.take(likeliest.squeeze(1))
        return centre.double() + self.deviation(weights, centre)

    def deviation(self, weights: Tensor, centre: Tensor) -> Tensor:
        """Return Σ_i w_i (x_i − c), see `Gathered.deviation`. A source has the first column of the weights."""
        stored = self.reference
        of_stored = weights if self.source is None else weights[:, 1:]
        total = compiled(stored_deviation)(
            stored.images, stored.hflip, self.ids, of_stored.float(), centre.float()
        )
        if self.source is None:
            return total

        return total + weighted_deviation(weights[:, :1], self.source.unsqueeze(1).float(), centre)


Images = Gathered | Stored


def gathered_images(
    reference: ReferenceSet,
    ids: Tensor,
    used: Tensor,
    source: Tensor | None = None,
    warp: Warp | None = None,
) -> Iterator[tuple[Tensor, Gathered]]:
    """Gather the images of each row, in pieces that fit a processor's cache.

    Args:
        reference: a local set.
        ids: (B, p). Unused places come last.
        used: (B,), how many places of each row are used.
        source: (B, *shape), one more image of each row, placed first; or None.
        warp: B maps for the images; or None.

    Yields:
        Rows (b,), and their images.
    """
    if not ids.is_cuda:
        # The C library returns memory to the system once the free memory exceeds twice the largest array freed so far.
        # New pages for each piece would take as long as the sums. So free a larger array first, without writing to it.
        torch.empty(6 * GATHER_BYTES, dtype=torch.uint8)

    for rows, places in _pieces(used, ids.shape[1], reference.d):
        x = reference.take(ids[rows, :places])
        if source is not None:
            first = source[rows].unsqueeze(1)
            x = torch.cat([first.to(x.dtype), x], 1)

        maps = None if warp is None else warp.rows(rows)
        yield rows, Gathered(x, maps)


def _pieces(used: Tensor, p: int, d: int) -> list[tuple[Tensor, int]]:
    """Group rows with similar numbers of used places. Returns the rows of each piece, and the largest of their numbers.

    The images of a piece take at most `GATHER_BYTES`, if it has more than one row. On a GPU all places count as used,
    because the CPU would have to wait for their number. An empty batch has one empty piece, so that callers can join
    the results.
    `used` (B,) counts the used places of each row, `p` all places of a row, and `d` is the dimension of an image.
    """
    B = len(used)
    order = used.argsort()
    most_images = GATHER_BYTES // (4 * d)
    if used.is_cuda:
        sizes = [p] * B
        most_images = GPU_FACTOR * GATHER_BYTES // (4 * d)
    else:
        sizes = used[order].tolist()

    if B == 0:
        return [(order, p)]

    pieces = []
    start = 0
    for stop in range(1, B + 1):
        # The rows are sorted, so the next row would be the largest of the piece, and all its rows get as many places.
        is_full = stop == B or (stop + 1 - start) * sizes[stop] > most_images
        if is_full or sizes[stop] > 2 * sizes[start]:
            pieces.append((order[start:stop], sizes[stop - 1]))
            start = stop
    return pieces


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Return whether PyTorch's compiler works, which needs a C compiler and Python's headers. Warns if it does not."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:
        warnings.warn(
            f"drawn images are copied; torch.compile does not work here: {first_line(error)}",
            stacklevel=2,
        )
        return False
    return True


def stored_sq_dist(images: Tensor, hflip: bool, ids: Tensor, z: Tensor) -> Tensor:
    """Return ‖z − x‖² from each z to its stored images: (B, n), float64.

    Args:
        images: (N, *shape), as they are stored.
        hflip: see `images_of`.
        ids: (B, n).
        z: (B, *shape).
    """
    difference = images_of(images, hflip, ids) - z.unsqueeze(1)
    return difference.flatten(2).square().sum(2, dtype=torch.float64)


def stored_deviation(
    images: Tensor, hflip: bool, ids: Tensor, weights: Tensor, centre: Tensor
) -> Tensor:
    """Return Σ_i w_i (x_i − c) of stored images, (B, *shape).

    Args:
        images: (N, *shape), as they are stored.
        hflip: see `images_of`.
        ids: (B, n).
        weights: (B, n).
        centre: (B, *shape), c.
    """
    deviation = (images_of(images, hflip, ids) - centre.unsqueeze(1)).flatten(2)
    return (weights.unsqueeze(2) * deviation).sum(1).reshape(centre.shape)


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function to one kernel that never holds the gathered images in memory."""
    return torch.compile(function, dynamic=True)
