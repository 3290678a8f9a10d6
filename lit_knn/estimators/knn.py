"""The nearest-neighbour estimator, Algorithm 1 of the paper."""

from typing import Self

import torch
from torch import Tensor

from lit_knn.estimators.base import Holdings
from lit_knn.estimators.counts import DEFAULT_K, DEFAULT_N, IMAGES, Count
from lit_knn.estimators.draws import Draws, draws_without_repetition, merged_draws
from lit_knn.estimators.sampled import SampledEstimator
from lit_knn.reference import Reference
from lit_knn.theory.posterior import direct_sq_dist
from lit_knn.theory.proposal import Proposal, neighbour_proposal, sample_proposal, stratified_sample_proposal

# At small t the likelihood ratio of two near neighbours hangs on digits that a search does not have, and only a
# few images matter. Their distances are recomputed, so that the proposal is right where it is concentrated.
RECOMPUTED_NEIGHBOURS = 16


class KNN(SampledEstimator):
    """SNIS (Eq. 11) with the nearest-neighbour proposal (Eq. 13, eq:proposal): Algorithm 1 (alg:estimator).

    Biased, O(1/n); the variance is that of `MonteCarlo` times at most Z_q/p_t(z) (Theorem 4.1). The search may be
    approximate: the likelihoods of the draws are exact, and images it misses belong to the flat tail, so the estimate
    is consistent as n → ∞. At a finite n it can be off where the search misses likely images at small t (an `IVF`
    index with a low nprobe), for there the tail is hardly ever drawn.

    What is likeliest at small t is the image that z was made from, which training knows. With `include_source` the
    proposal has it among the neighbours where the search missed it and it is nearer than the farthest that was found.
    Unlike STF's it is a draw like any other, weighted by p/q, so the estimate stays consistent, and with exact search
    it is that of the paper to the last bit.

    Args:
        k: neighbours searched per z; null for the paper's 2048, or N where that is less. It is also the most that FAISS
            finds on a GPU.
        n: draws per z; null for the paper's 256.
        include_source: propose also `x_source`, where it is given and in the set; it costs a search for one vector,
            which is cheap where the index has lists and as expensive as the other where it is exact and needs it not.

    Raises:
        InputError: k < 1, n < 1; at `bind`, k > N.
    """

    shardable = True

    k = Count(DEFAULT_K, IMAGES)

    def __init__(self, k: int | None = None, n: int | None = None, include_source: bool = False) -> None:
        self.k, self.n = k, n
        self.include_source = self.uses_source = include_source

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`; builds the neighbour index of the set."""
        super().bind(reference)
        reference.build_index(self.k)
        # One query brings out what the index refuses before training does.
        reference.search(torch.zeros(1, *reference.shape, device=reference.device), self.k)
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`: the index."""
        return Holdings(neighbours=KNN.k.within(self, N, d))

    def proposal(self, z: Tensor, t: Tensor, x_source: Tensor | None = None) -> Proposal:
        """The proposal that draws for z (B, *shape) at t (B,) come from, Eq. 13 (eq:proposal)."""
        sq_dist, neighbours = self.reference.search(z, self.k)
        sq_dist = self._recompute_nearest(z, sq_dist, neighbours)
        if self.include_source and x_source is not None:
            sq_dist, neighbours = self._with_source(z, x_source, sq_dist, neighbours)
        return neighbour_proposal(sq_dist, neighbours, t, self.reference.N)

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        ids, log_q = sample_proposal(self.proposal(z, t, x_source), self.n, generator)
        return merged_draws(ids, -log_q)

    def _with_source(self, z: Tensor, x_source: Tensor, sq_dist: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Add the source of each z as one more neighbour, or as a missing one where nothing would change."""
        source = self.reference.locate(x_source).unsqueeze(1)
        source_sq_dist = direct_sq_dist(z, self.reference.gather(source.clamp(min=0)))
        found = ids >= 0
        # Farther than all neighbours it would lower the tail, whose likelihood is that of the farthest.
        farthest = torch.where(found, sq_dist, -torch.inf).amax(1, keepdim=True)
        nearer = (source_sq_dist < farthest) | ~found.any(1, keepdim=True)
        missed = (source >= 0) & (ids != source).all(1, keepdim=True) & nearer
        sq_dist = torch.cat([sq_dist, torch.where(missed, source_sq_dist, torch.inf)], 1)
        return sq_dist, torch.cat([ids, torch.where(missed, source, -1)], 1)

    def _recompute_nearest(self, z: Tensor, sq_dist: Tensor, ids: Tensor) -> Tensor:
        """Replace the distances of the first few neighbours by exact ones; (B, k), float64."""
        nearest = ids[:, :RECOMPUTED_NEIGHBOURS]
        exact = direct_sq_dist(z, self.reference.gather(nearest.clamp(min=0)))
        sq_dist = sq_dist.double()
        sq_dist[:, :RECOMPUTED_NEIGHBOURS] = torch.where(nearest >= 0, exact, torch.inf)
        return sq_dist


class StratifiedKNN(KNN):
    """`KNN` with draws without repetition from the same proposal, Eq. 13 (eq:proposal).

    Neighbours that are sure to be drawn are kept. The other places are spread evenly over the rest of the proposal, its
    other neighbours and its tail, and an image's weight is p/q times the share of q that it stands for. So no place
    goes to an image that is drawn already, and n = N is the exact mean. The gain over `KNN` is the price of the
    paper's independent draws.

    Args:
        k: as `KNN`.
        n: images drawn per z; null for 256, or N where that is less.
        include_source: as `KNN`.

    Raises:
        InputError: k < 1, n < 1; at `bind`, k > N or n > N.
    """

    n = Count(DEFAULT_N, IMAGES)

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        proposal = self.proposal(z, t, x_source)
        return draws_without_repetition(stratified_sample_proposal(proposal, self.n, generator))
