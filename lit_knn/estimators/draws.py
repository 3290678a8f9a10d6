"""Images drawn for each z, and their weighted mean, Eq. 11 (eq:SNIS_estimator)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_knn.reference import ReferenceSet
from lit_knn.reference.gathered import Images, Stored, can_compile, gathered_images
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.warp import Warp


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Images drawn for each z. Their weights are proportional to likelihood times a factor, such as 1/q.

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


def merged(ids: Tensor, log_factor: Tensor, of_posterior: bool = False) -> Draws:
    """Make `Draws` of independent draws, where an image that was drawn several times takes one place.

    So each image is gathered once. At small t all draws are often the same image.

    Args:
        ids: (B, n).
        log_factor: (B, n), float64, equal for equal ids.
        of_posterior: as in `Draws`.
    """
    # A GPU rereads an image from its cache, which is faster than finding the repetitions.
    if ids.is_cuda:
        return Draws(ids=ids, log_factor=log_factor, of_posterior=of_posterior)

    # Equal ids lie together after sorting, and get one place: the number of different ids before them.
    ids, order = ids.sort(1)
    is_new = torch.ones_like(ids, dtype=torch.bool)
    is_new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = is_new.cumsum(1) - 1

    copies = torch.zeros_like(log_factor).scatter_add_(1, place, torch.ones_like(log_factor))
    # The factor of a place counts all its draws. Places that are not used have no copies, so their log factor is −inf.
    log_factor = log_factor.scatter(1, place, log_factor.gather(1, order)) + copies.log()
    ids = ids.scatter(1, place, ids)
    return Draws(ids=ids, log_factor=log_factor, copies=copies, of_posterior=of_posterior)


def weighted_mean(
    reference: ReferenceSet, draws: Draws, z: Tensor, t: Tensor, warp: Warp | None = None
) -> Tensor:
    """Average the drawn images with the weights of `weights_of`, Eq. 11 (eq:SNIS_estimator).

    Args:
        reference: the set of the images.
        draws: the images of each z.
        z: (B, *shape).
        t: (B,).
        warp: B maps. The likelihoods are then of the warped images, but the mean is still of the images themselves.

    Returns:
        (B, *shape), float64.
    """
    mean = torch.empty(z.shape, dtype=torch.float64, device=z.device)
    for rows, images in drawn_images(reference, draws, warp):
        weights = weights_of(draws, images, rows, z, t)
        mean[rows] = images.mean(weights)
    return mean


def weights_of(draws: Draws, images: Images, rows: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """Return the weights of the images of some rows of z, (b, p), float64; those of a row sum to 1.

    A weight is the image's exact likelihood times its factor, divided by the sum over the row. These are lines 6 and 7
    of Algorithm 1.

    Args:
        draws: the draws of all rows.
        images: the images of `rows`, (b,).
        rows: numbers of the rows.
        z: (B, *shape), all latents.
        t: (B,).
    """
    log_weights = draws.log_factor[rows, : images.places]
    if not draws.of_posterior:
        sq_dist = images.sq_dist(z[rows])
        log_weights = log_weights + unnormalised_log_likelihood(sq_dist, t[rows])
    return torch.softmax(log_weights, dim=1)


def drawn_images(
    reference: ReferenceSet, draws: Draws, warp: Warp | None = None
) -> Iterator[tuple[Tensor, Images]]:
    """Yield the images of all rows in pieces of bounded memory: some rows (b,), in any order, and their images.

    On CUDA the images stay in the set if they can. A sharded set first fetches all images at once, each image once.

    Args:
        reference: the set of the images.
        draws: the images of each z.
        warp: B maps for the images.
    """
    used = used_places(draws)
    ids = draws.ids
    if reference.sharded:
        # Unused places get the first image of the row, which is fetched anyway.
        place = torch.arange(ids.shape[1], device=ids.device)
        ids = torch.where(place < used.unsqueeze(1), ids, ids[:, :1])
    local, ids = reference.fetch(ids)

    if warp is None and ids.is_cuda and can_compile(ids.device):
        every_row = torch.arange(len(ids), device=ids.device)
        return iter([(every_row, Stored(local, ids, draws.source))])
    return gathered_images(local, ids, used, draws.source, warp)


def used_places(draws: Draws) -> Tensor:
    """Count the places of each row up to the last one that is used, (B,)."""
    B, p = draws.ids.shape
    if p == 0:
        return draws.ids.new_zeros(B)

    is_used = draws.log_factor[:, -p:] > -torch.inf
    place = torch.arange(p, device=draws.ids.device)
    return (is_used * (place + 1)).amax(1)


class ResultRows:
    """Collects the results of pieces of rows, in the order of the rows.

    Each piece is copied to its place at once. Pieces that are kept for later would lie between the gathered images in
    memory, and so each piece would need new pages.

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
