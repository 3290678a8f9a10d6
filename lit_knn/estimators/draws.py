"""Estimators that draw n images for each z: they weight the images, average them, and certify the mean."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lit_knn.common.memory import GPU_FACTOR
from lit_knn.common.rng import seeded_from
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.checks import checked_mean, checked_query
from lit_knn.index.precision import full_float32
from lit_knn.reference import ReferenceSet
from lit_knn.reference.gathered import Gathered, Images, Stored, stays_stored
from lit_knn.theory.posterior import unnormalised_log_likelihood
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


class Certificate(NamedTuple):
    """An estimate of the posterior mean, with an estimate of its error.

    Attributes:
        mean: (B, *shape), the estimate of the posterior mean.
        effective_sample_size: (B,), float64, 1 / Σ w_i², between 1 and n.
        largest_weight: (B,), float64, max w_i.
        sq_error: (B,), float64, estimated squared error per dimension. Images that were not drawn do not count: if one
            draw has all the weight, the estimate is 0. So it is too low if few draws have the weight. Trust its
            mean over many z from an effective sample size of 20 on (`KNN`) or 40 (`UniformSNIS`). For draws from the
            posterior (`MonteCarlo`) it holds from n = 2 on.
    """

    mean: Tensor
    effective_sample_size: Tensor
    largest_weight: Tensor
    sq_error: Tensor


class DrawingEstimator(Estimator):
    """An estimator that draws images for each z and averages them, so that it can say how far off its mean is."""

    searches = False
    """Whether the draws come from the proposal of near images, Eq. 13 (eq:proposal)."""

    @abstractmethod
    def draw(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Draws:
        """Draw the images of each z. The arguments are those of `_posterior_mean`, but `t` is (B,)."""

    @torch.no_grad()
    def certified_mean(
        self,
        z: Tensor,
        t: Tensor | float,
        x_source: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Certificate:
        """Compute `posterior_mean` together with an estimate of its error.

        The mean equals `posterior_mean` if the generator is in the same state. The error is the variance of Eq. 12
        (eq:SNIS_Var), with the weights of the draws in place of the posterior. It holds for large n: `Certificate`
        says from which effective sample size on.
        """
        query = checked_query(self, z, t, x_source, generator)
        t = query.t.flatten()
        if len(z) == 0 and not self._asked_with_others():
            return Certificate(z.clone(), t, t, t)

        # The hook may overwrite its arguments.
        source = query.x_source.clone() if self.uses_source and query.x_source is not None else None
        generator = None if self.deterministic else generator
        with full_float32(), seeded_from(generator):
            draws = self.draw(z.clone(), t.clone(), source, generator)
            certificate = self._certificate(draws, z, t)
        return certificate._replace(mean=checked_mean(self, certificate.mean, z))

    def _certificate(self, draws: Draws, z: Tensor, t: Tensor) -> Certificate:
        """Average the draws of z at t (B,), and estimate the error."""
        return certificate_of(self.reference, draws, z, t)


def weighted_mean(
    reference: ReferenceSet, draws: Draws, z: Tensor, t: Tensor, warp: Warp | None = None
) -> Tensor:
    """Average the drawn images, weighted by likelihood times their factor, Eq. 11 (eq:SNIS_estimator): (B, *shape).

    `z` is (B, *shape), and `t` is (B,). `warp` changes the likelihoods, not the images.
    """
    results = ResultRows(len(z))
    for rows, images in drawn_images(reference, draws, warp):
        weights = weights_of(draws, images, rows, z, t)
        results.put(rows, images.mean(weights))
    return results.columns[0]


def weights_of(draws: Draws, images: Images, rows: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """Return the weights of the images of some rows of z, (b, p), float64, which sum to 1."""
    log_weights = draws.log_factor[rows, : images.places]
    if not draws.of_posterior:
        log_weights = log_weights + unnormalised_log_likelihood(images.sq_dist(z[rows]), t[rows])
    return torch.softmax(log_weights, dim=1)


def warped_weighted_mean(
    estimator: DrawingEstimator,
    z: Tensor,
    t: Tensor,
    warp: Warp,
    x_source: Tensor,
    generator: Generator | None,
) -> Tensor:
    """Average warped images: the hook `_warped_mean` of the estimators whose draws are near z."""
    t = t.flatten()
    near_z, near_t = warp.query(z, t, x_source, estimator.reference.mean())
    draws = estimator.draw(near_z, near_t, x_source if estimator.uses_source else None, generator)

    # The mean of warped images is the warped mean, so one resampling serves all n images.
    mean = weighted_mean(estimator.reference, draws, z, t, warp)
    return warp.apply(mean.to(x_source.dtype))


def certificate_of(reference: ReferenceSet, draws: Draws, z: Tensor, t: Tensor) -> Certificate:
    """Average independent draws like `weighted_mean`, and estimate the error of the mean."""
    results = ResultRows(len(z))
    for rows, images in drawn_images(reference, draws):
        weights = weights_of(draws, images, rows, z, t)
        mean = images.mean(weights)

        # Weights of single draws, because one place may stand for several.
        single = weights
        if draws.copies is not None:
            single = weights / draws.copies[rows, : images.places].clamp(min=1)
        sample_size = 1 / (weights * single).sum(1)
        results.put(
            rows, mean, sample_size, single.amax(1), sq_error(weights, single, images, mean)
        )
    return Certificate(*results.columns)


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


def sq_error(weights: Tensor, single: Tensor, images: Images, mean: Tensor) -> Tensor:
    """Estimate the squared error per dimension of the mean of independent draws: (B,), float64.

    It is the variance of Eq. 12 (eq:SNIS_Var), with the weights of the draws in place of the posterior. `single` is the
    weight of a single draw at each place. `weights` and `single` are (B, p), `mean` is (B, *shape).
    """
    sq_weights = weights * single
    # The mean comes from the same draws, so divide by `left`. For equal weights, this replaces n by the n − 1 of a
    # sample variance.
    left = 1 - sq_weights.sum(1)
    variance = (sq_weights * images.sq_dist(mean.float())).sum(1) / left
    return torch.where(left > 0, variance, 0.0) / mean.shape[1:].numel()


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
