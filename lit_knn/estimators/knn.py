"""The nearest-neighbour estimator, Algorithm 1 of the paper, and the mean over only the nearest images."""

from typing import Self

import torch
from torch import Generator, Tensor

from lit_knn.estimators.base import Holdings
from lit_knn.estimators.counts import DEFAULT_K, DEFAULT_N, Count, of_images
from lit_knn.estimators.draws import Certificate, DrawingEstimator, Draws, merged
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import direct_sq_dist
from lit_knn.theory.proposal import Proposal, neighbour_proposal, sample_proposal

# Number of nearest neighbours that get exact distances. At small t only a few images matter, and the likelihood ratio
# of two near neighbours depends on digits that a search does not have.
RECOMPUTED_NEIGHBOURS = 16


class NeighbourEstimator(DrawingEstimator):
    """Base of the estimators that search the k nearest images of each z."""

    k = Count(DEFAULT_K, of_images)

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        reference.try_search(self.k)
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        return Holdings(neighbours=type(self).k.within(self, N, d))


class KNN(NeighbourEstimator):
    """SNIS (Eq. 11) with the nearest-neighbour proposal (Eq. 13, eq:proposal): Algorithm 1 (alg:estimator).

    It is biased, O(1/n). Its variance is at most Z_q/p_t(z) times the variance of `MonteCarlo` (Theorem 4.1). The
    search may be approximate: likelihoods of the draws are exact, and missed images belong to the flat tail, so the
    estimate is consistent as n → ∞. At small t and finite n the estimate can be far off if the search misses likely
    images (an `IVF` index with a low nprobe), because the tail is hardly ever drawn.

    At small t the likeliest image is the source of z, which training knows. With `include_source`, the source becomes
    a neighbour if the search missed it and it is nearer than the farthest one found. Unlike in STF, the source is
    weighted by p/q like any other draw, so the estimate stays consistent. With exact search, this option does not
    change any bit of the result.

    Args:
        k: neighbours searched per z, at most N; null for the paper's 2048, or N if that is less. FAISS on a GPU finds
            at most 2048.
        n: draws per z; null for the paper's 256.
        include_source: also propose `x_source`, if it is given and in the set. This costs one more search for a single
            neighbour. The search is cheap if the index has lists. If the index is exact, it is as expensive as the
            first search, and useless.
    """

    searches = True
    shardable = True

    def __init__(self, k: int | None = None, n: int | None = None, include_source: bool = False) -> None:
        self.k, self.n = k, n
        self.include_source = self.uses_source = include_source

    def proposal(self, z: Tensor, t: Tensor, x_source: Tensor | None = None) -> Proposal:
        """Build the proposal for z (B, *shape) at t (B,), Eq. 13 (eq:proposal)."""
        sq_dist, ids = self.reference.search(z, self.k)
        sq_dist = sq_dist.double()
        sq_dist[:, :RECOMPUTED_NEIGHBOURS] = self._exact_sq_dist(z, ids[:, :RECOMPUTED_NEIGHBOURS])
        if x_source is not None:
            sq_dist, ids = self._with_source(z, x_source, sq_dist, ids)
        return neighbour_proposal(sq_dist, ids, t, self.reference.N)

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None) -> Draws:
        proposal = self.proposal(z, t, x_source if self.include_source else None)
        ids, log_q = sample_proposal(proposal, self.n, generator)
        return merged(ids, -log_q)

    def _with_source(self, z: Tensor, x_source: Tensor, sq_dist: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Add the source of each z as one more neighbour, or id −1 if the source is not needed."""
        source = self.reference.locate(x_source).unsqueeze(1)
        source_sq_dist = self._exact_sq_dist(z, source)
        # Do not add a source that is farther than all neighbours, because this source would lower the tail.
        farthest = torch.where(ids >= 0, sq_dist, -torch.inf).amax(1, keepdim=True)
        missed = (source >= 0) & (ids != source).all(1, keepdim=True) & (source_sq_dist < farthest)
        sq_dist = torch.cat([sq_dist, torch.where(missed, source_sq_dist, torch.inf)], 1)
        return sq_dist, torch.cat([ids, torch.where(missed, source, -1)], 1)

    def _exact_sq_dist(self, z: Tensor, ids: Tensor) -> Tensor:
        """Compute ‖z − x‖² from z (B, *shape) to the images of `ids` (B, n), inf for id −1: (B, n), float64."""
        sq_dist = direct_sq_dist(z, self.reference.take(ids.clamp(min=0)))
        return torch.where(ids >= 0, sq_dist, torch.inf)


class TopK(NeighbourEstimator):
    """The posterior mean (Eq. 8, eq:posterior_mean) over the k nearest images of each z, as if there were no others.

    It is deterministic. Its bias comes from the weight of the other images. At small t few images have weight, so it is
    nearly exact. As t → ∞ it is the plain mean of k near images. It is a baseline for `KNN`, which also draws from the
    other images. At k = N it is the exact mean. If an approximate index finds other images, or fewer, the mean is over
    the images that it finds.

    Args:
        k: images per z, at most N; null for 256, or N if that is less.
    """

    deterministic = True
    shardable = True

    k = Count(DEFAULT_N, of_images)

    def __init__(self, k: int | None = None) -> None:
        self.k = k

    @property
    def n(self) -> int:
        """Number of images that are averaged."""
        return self.k

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None) -> Draws:
        _, ids = self.reference.search(z, self.k)
        # An approximate index marks empty places by −1.
        log_factor = torch.zeros_like(ids, dtype=torch.float64).masked_fill_(ids < 0, -torch.inf)
        return Draws(ids=ids.clamp(min=0), log_factor=log_factor)

    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None) -> Certificate:
        certificate = super()._certify(z, t, x_source, generator)
        # The error comes from the images that are left out, and the draws do not show it.
        return certificate._replace(sq_error=torch.full_like(certificate.sq_error, torch.inf))
