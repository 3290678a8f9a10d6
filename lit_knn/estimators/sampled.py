"""What the sampling estimators share: gathering the drawn images and averaging them, in bounded memory."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.estimators.base import Estimator
from lit_knn.estimators.counts import DEFAULT_N, Count
from lit_knn.estimators.streaming import GPU_FACTOR
from lit_knn.posterior import direct_sq_dist, unnormalised_log_likelihood
from lit_knn.reference import ReferenceSet
from lit_knn.snis import snis_weights, weighted_mean

# Images gathered at a time on a CPU, as float32: near the size of its cache, where passes over them are cheapest.
GATHER_BYTES = 4 * 2**20


class Draws(NamedTuple):
    """Images drawn for each z, and how they are weighted.

    Attributes:
        ids: (B, n), the draws.
        weights: (`sq_dist` (b, n), rows) -> (b, n), weights that sum to 1 from the exact distances of the draws of
            z[rows].
        x_source: (B, *shape), one more image for each z, put in front of the drawn ones, or None.
    """

    ids: Tensor
    weights: Callable[[Tensor, slice], Tensor]
    x_source: Tensor | None = None


class Certificate(NamedTuple):
    """An estimate with what it knows of its own error.

    Attributes:
        mean: (B, *shape), the estimate of the posterior mean.
        effective_sample_size: (B,), float64, 1 / Σ w_i², between 1 and n.
        largest_weight: (B,), float64, max w_i.
        sq_error: (B,), float64, estimated squared error per dimension. What is not among the draws it cannot see: where
            one draw has all the weight it is 0. Infinite where the estimator knows that it cannot tell.
    """

    mean: Tensor
    effective_sample_size: Tensor
    largest_weight: Tensor
    sq_error: Tensor


class CertifiedEstimator(Estimator):
    """An estimator from n weighted images that can tell how far off it may be; subclasses implement `_certify`."""

    n = Count(DEFAULT_N)
    """Images drawn for each z, with repetition, so that there may be more of them than images in the set."""

    @torch.no_grad()
    def certified_mean(
        self,
        z: Tensor,
        t: Tensor | float,
        x_source: Tensor | None = None,
        generator: torch.Generator | None = None,
        labels: Tensor | None = None,
    ) -> Certificate:
        """`posterior_mean` of the same arguments, and a generator in the same state, with its estimated error.

        The error is the variance of Eq. 12 (eq:SNIS_Var) with the weights of the draws in the place of the posterior.
        """
        t = self._check(z, t, x_source, labels)
        if self._nothing_to_do(z):
            return Certificate(z.clone(), t, t, t)
        with torch.autocast(z.device.type, enabled=False):
            if labels is None:
                certificate = self._certify(z, t, x_source, generator)
            else:
                certificate = self._certify_classes(z, t, x_source, generator, labels)
        return certificate._replace(mean=certificate.mean.to(z.dtype))

    def _certify_classes(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None, labels: Tensor
    ) -> Certificate:
        """As `_certify`, over the images of each row's class."""
        parts, order = [], []
        for part, rows in self._by_class(labels):
            source = None if x_source is None else x_source[rows]
            parts.append(part._certify(z[rows], t[rows], source, generator))
            order.append(rows)
        return in_order(parts, order)

    @abstractmethod
    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Certificate:
        """As `certified_mean`, with checked arguments."""


class SampledEstimator(CertifiedEstimator):
    """An estimator that draws n images for each z and averages them; subclasses implement `_draw`."""

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        mu = torch.empty(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        for rows, x, weights in self._weighted(z, t, x_source, generator):
            mu[rows] = weighted_mean(weights, x).to(mu.dtype)
        return mu

    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Certificate:
        parts = []
        for _, x, weights in self._weighted(z, t, x_source, generator):
            mean = weighted_mean(weights, x)
            spread = (weights.square() * direct_sq_dist(mean, x)).sum(1) / self.reference.d
            # The mean is itself that of the draws: for equal weights this is the n − 1 of a sample variance.
            left = 1 - weights.square().sum(1)
            sq_error = torch.where(left > 0, spread / left, 0.0)
            parts.append(Certificate(mean, *weight_spread(weights), sq_error))
        return Certificate(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _weighted(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows of z, the images drawn for them (b, n, *shape), and their weights (b, n), float64."""
        draws = self._draw(z, t, x_source, generator)
        for rows, x in gather(self.reference, draws.ids, draws.x_source):
            yield rows, x, draws.weights(direct_sq_dist(z[rows], x), rows).double()

    @abstractmethod
    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        """Draw the images of each z; arguments as `_posterior_mean`."""


def in_order(parts: Sequence[Certificate], rows: Sequence[Tensor]) -> Certificate:
    """The certificates of `rows`, which together are 0 to B − 1, as one certificate of B rows."""
    position = torch.cat(list(rows)).argsort()
    return Certificate(*(torch.cat(part)[position] for part in zip(*parts, strict=True)))


def weight_spread(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Effective sample size and largest weight of weights (B, n) that sum to 1: (B,) each."""
    return 1 / weights.square().sum(1), weights.amax(1)


def snis_draws(ids: Tensor, t: Tensor, log_q: Tensor | None = None, x_source: Tensor | None = None) -> Draws:
    """Draws of a proposal with the weights of the SNIS estimate, Eq. 11 (eq:SNIS_estimator).

    Args:
        ids: (B, n), the draws.
        t: (B,).
        log_q: (B, n), their log-probabilities; None for a uniform proposal.
        x_source: as in `Draws`; weighted as if it were a uniform draw. Not together with `log_q`.
    """

    def weights(sq_dist: Tensor, rows: slice) -> Tensor:
        log_p = unnormalised_log_likelihood(sq_dist, t[rows])
        return snis_weights(log_p, 0.0 if log_q is None else log_q[rows])

    return Draws(ids, weights, x_source)


def uniform_ids(reference: ReferenceSet, batch: int, n: int, generator: torch.Generator | None) -> Tensor:
    """(batch, n) independent uniform draws of image ids, with replacement, where the images are."""
    return torch.randint(reference.N, (batch, n), device=reference.device, generator=generator)


def gather(reference: ReferenceSet, ids: Tensor, x_source: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of `ids` (B, n) and their images, (b, n, *shape), in bounded memory; the source first if given.

    Of a sharded set this process then holds all of them, but each once and as it is stored.
    """
    reference, ids = reference.fetch(ids)
    n = ids.shape[1] + (x_source is not None)
    budget = GATHER_BYTES if ids.device.type == "cpu" else GATHER_BYTES * GPU_FACTOR
    step = max(budget // (4 * n * reference.d), 1)
    # Without any row, too, there is one yield for those who put together what they get.
    for start in range(0, max(len(ids), 1), step):
        rows = slice(start, start + step)
        x = reference.gather(ids[rows])
        if x_source is not None:
            x = torch.cat([x_source[rows].unsqueeze(1).to(x.dtype), x], dim=1)
        yield rows, x
