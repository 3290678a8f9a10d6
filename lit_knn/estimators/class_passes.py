"""Class-conditional estimates of a whole batch at once, for GPUs: no loop over classes, no index for each class.

`ByClass` looks up its wrapped estimator in `PASSES`. A row's candidates are the images of its class, whose number
differs from row to row. Their distances are computed exactly, so a search in a class misses nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.estimators.base import Estimator
from lit_knn.estimators.draws import Draws, uniform_draws
from lit_knn.estimators.exact import Exact
from lit_knn.estimators.knn import KNN
from lit_knn.estimators.monte_carlo import MonteCarlo
from lit_knn.estimators.stf import STF
from lit_knn.estimators.uniform_snis import UniformSNIS
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import ClassTable
from lit_knn.reference.gathered import gathered_mean, gathered_sq_dist
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.proposal import neighbour_proposal, sample_proposal


class ClassBatch(NamedTuple):
    """Latents with the images of their classes. A place is the number of an image within its class.

    Attributes:
        reference: the whole set.
        table: its classes.
        which: (B,), position of each z's class in `table`.
        z: (B, *shape).
        t: (B,), float64.
        x_source: (B, *shape) or None.
        generator: source of all randomness, or None.
    """

    reference: ReferenceSet
    table: ClassTable
    which: Tensor
    z: Tensor
    t: Tensor
    x_source: Tensor | None
    generator: torch.Generator | None

    @property
    def N(self) -> Tensor:
        """Number of images of each z's class, (B, 1), int64."""
        return self.table.sizes[self.which].unsqueeze(1)

    def ids(self, places: Tensor) -> Tensor:
        """Return the ids in the whole set of places (B, n)."""
        return self.table.ids_of(self.which, places)

    def every_id(self) -> Tensor:
        """Return the ids of all images of each z's class: (B, most), −1 behind the last one."""
        places = torch.arange(self.table.most, device=self.z.device).expand(len(self.z), -1)
        return torch.where(places < self.N, self.ids(places), -1)

    def sq_dist(self, ids: Tensor, z: Tensor) -> Tensor:
        """Return ‖z − x‖², float64, for `every_id()`; inf behind the last image."""
        return gathered_sq_dist(self.reference, ids, z)

    def rand(self, n: int) -> Tensor:
        """Draw (B, n) uniform random numbers, float64."""
        shape = len(self.z), n
        return torch.rand(shape, dtype=torch.float64, device=self.z.device, generator=self.generator)


def exact_mean(estimator: Exact, batch: ClassBatch) -> Tensor:
    """Compute the posterior mean over each class, Eq. 8 (eq:posterior_mean), with weights in float64."""
    ids = batch.every_id()
    log_p = unnormalised_log_likelihood(batch.sq_dist(ids, batch.z.double()), batch.t)
    return gathered_mean(batch.reference, ids, torch.softmax(log_p, dim=1))


def neighbour_draws(estimator: KNN, batch: ClassBatch) -> Draws:
    """Draw from the proposal of the k nearest images of each class, Eq. 13 (eq:proposal). The search is exact."""
    k = min(estimator.k, batch.table.most)
    sq_dist, place = batch.sq_dist(batch.every_id(), batch.z).topk(k, dim=1, largest=False)
    # A class with fewer than k images lacks some neighbours, and has no tail.
    place = place.masked_fill_(sq_dist == torch.inf, -1)
    proposal = neighbour_proposal(sq_dist, place, batch.t, batch.N)
    drawn, log_q = sample_proposal(proposal, estimator.n, batch.generator)
    return Draws(batch.ids(drawn), -log_q)


def posterior_draws(estimator: MonteCarlo, batch: ClassBatch) -> Draws:
    """Draw from the exact posterior over each class, Eq. 2 (eq:posterior)."""
    log_p = unnormalised_log_likelihood(batch.sq_dist(batch.every_id(), batch.z.double()), batch.t)
    cdf = torch.softmax(log_p, dim=1).cumsum(1)
    drawn = torch.searchsorted(cdf / cdf[:, -1:], batch.rand(estimator.n), right=True)
    return Draws(batch.ids(drawn), torch.zeros_like(drawn, dtype=torch.float64), of_posterior=True)


def class_uniform_draws(estimator: STF | UniformSNIS, batch: ClassBatch) -> Draws:
    """Draw images of each class uniformly. `STF` puts a given source in the place of one draw."""
    source = batch.x_source if estimator.uses_source else None
    n = estimator.n - (source is not None)
    return uniform_draws(batch.ids((batch.rand(n) * batch.N).long()), source)


MEANS: dict[type[Estimator], Callable[..., Tensor]] = {Exact: exact_mean}
"""Computes the means of a batch, by the type of the wrapped estimator. Subclasses may compute otherwise."""

DRAWS: dict[type[Estimator], Callable[..., Draws]] = {
    KNN: neighbour_draws,
    MonteCarlo: posterior_draws,
    STF: class_uniform_draws,
    UniformSNIS: class_uniform_draws,
}
"""Draws the images of a batch, as `MEANS`. The wrapped estimator then averages them."""
