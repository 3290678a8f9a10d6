"""The nearest-neighbour estimator, Algorithm 1 of the paper (alg:estimator).

The paper does not number the lines of the algorithm. Here they are counted from `search`:

1. K, d ← search(I, z, k): `ReferenceSet.search`, which `KNN.proposal` calls.
2. p_t(z|x_i) ← exp(−d_i²/2t²) for the neighbours in K: `unnormalised_log_likelihood`, called by `neighbour_proposal`.
3. Z_q ← Σ_i p_t(z|x_i) + (N − k)·p_t(z|x_k): `neighbour_proposal`.
4. q_t(x|z) ← p_t(z|x)/Z_q for the neighbours and p_t(z|x_k)/Z_q for all other images: `neighbour_proposal`.
5. Sample x_1, …, x_n from q_t(x|z): `sample_proposal`.
6. w_i ← p_t(z|x_i)/q_t(x_i|z): `weights_of`.
7. w̄_i ← w_i / Σ_j w_j: `weights_of`.
8. μ̂ ← Σ_i w̄_i x_i: `weighted_mean`.
9. Return (μ̂ − z)/t²: `Estimator.score`.

The likelihood p is computed twice: in line 2 from the distances of the search, which may be approximate but for the
nearest 16, and in line 6 exactly, from the gathered images. `weights_of` and `weighted_mean` are in `draws.py`;
`DrawingEstimator` calls them for all estimators that draw.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Generator, Tensor

from lit_knn.estimators.certificate import DrawingEstimator, warped_weighted_mean
from lit_knn.estimators.counts import Limit, count, of_images
from lit_knn.estimators.draws import Draws, merged
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import direct_sq_dist
from lit_knn.theory.proposal import Proposal, neighbour_proposal, sample_proposal

# Number of nearest neighbours that get exact distances. At small t only a few images matter, and the likelihood ratio
# of two near neighbours depends on digits that a search does not have.
RECOMPUTED_NEIGHBOURS = 16


class KNN(DrawingEstimator):
    """SNIS (Eq. 11) with the nearest-neighbour proposal (Eq. 13, eq:proposal): Algorithm 1 (alg:estimator).

    It is biased, O(1/n). Its variance is at most Z_q/p_t(z) times the variance of `MonteCarlo` (Theorem 4.1). The
    search may be approximate: likelihoods of the draws are exact, and missed images belong to the flat tail, so the
    estimate is consistent as n → ∞. At small t and finite n the estimate can be far off if the search misses likely
    images (an `IVF` index with a low nprobe), because the tail is hardly ever drawn.

    At small t the likeliest image is the source of z, which training knows. With `include_source`, the source becomes
    a neighbour if the search missed it and it is nearer than the farthest one found. Unlike in STF, the source is
    weighted by p/q like any other draw, so the estimate stays consistent. With exact search, this option
    changes only the rounding of the result.

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
    limits: ClassVar[Mapping[str, Limit]] = {"k": of_images}

    def __init__(
        self, k: int | None = None, n: int | None = None, include_source: bool = False
    ) -> None:
        self.k = count(self, "k", k)
        self.n = count(self, "n", n)
        self.include_source = include_source
        self.uses_source = include_source

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        reference.build_index(self.k)
        # This search is made for the InputError that impossible settings raise: now, not in a training step.
        reference.search(torch.zeros(1, *reference.shape, device=reference.device), self.k)
        return self

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {}

    _warped_mean = warped_weighted_mean

    def draw(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Draws:
        """Draw the images of each z from its proposal, lines 1 to 5 of Algorithm 1.

        The weight of a draw is w = p/q. `Draws` holds −log q, and `weights_of` adds the exact log p.
        """
        proposal = self.proposal(z, t, x_source)
        ids, log_q = sample_proposal(proposal, self.n, generator)
        return merged(ids, -log_q)

    def proposal(self, z: Tensor, t: Tensor, x_source: Tensor | None = None) -> Proposal:
        """Build the proposal of each z from its neighbours, Eq. 13 (eq:proposal), lines 1 to 4 of Algorithm 1.

        Args:
            z: (B, *shape).
            t: (B,).
            x_source: (B, *shape), sources that become neighbours if the search misses them.
        """
        reference = self.reference
        sq_dist, ids = reference.search(z, self.k)
        sq_dist = sq_dist.double()

        nearest = ids[:, :RECOMPUTED_NEIGHBOURS]
        sq_dist[:, :RECOMPUTED_NEIGHBOURS] = exact_sq_dist(reference, z, nearest)
        if x_source is not None:
            sq_dist, ids = self._with_source(z, x_source, sq_dist, ids)
        return neighbour_proposal(sq_dist, ids, t, reference.N)

    def _with_source(
        self, z: Tensor, x_source: Tensor, sq_dist: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return distances and ids with one more column: the source of each z, or id −1 if it is no new neighbour."""
        source = self.reference.locate(x_source).unsqueeze(1)
        source_sq_dist = exact_sq_dist(self.reference, z, source)
        sq_dist = torch.where(ids == source, source_sq_dist, sq_dist)

        # Do not add a source that is farther than all neighbours, because this source would lower the tail.
        farthest = torch.where(ids >= 0, sq_dist, -torch.inf).amax(1, keepdim=True)
        missed = (source >= 0) & (ids != source).all(1, keepdim=True) & (source_sq_dist < farthest)

        sq_dist = torch.cat([sq_dist, torch.where(missed, source_sq_dist, torch.inf)], 1)
        ids = torch.cat([ids, torch.where(missed, source, -1)], 1)
        return sq_dist, ids


def exact_sq_dist(reference: ReferenceSet, z: Tensor, ids: Tensor) -> Tensor:
    """Compute ‖z − x‖² from the difference of z and x.

    Args:
        reference: the set of the images x.
        z: (B, *shape).
        ids: (B, n), −1 for no image.

    Returns:
        (B, n), float64; inf for no image.
    """
    sq_dist = direct_sq_dist(z, reference.take(ids.clamp(min=0)))
    return torch.where(ids >= 0, sq_dist, torch.inf)
