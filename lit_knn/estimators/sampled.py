"""Base class of the sampling estimators. It gathers the drawn images and averages them, in bounded memory."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.counts import DEFAULT_N, Count
from lit_knn.estimators.drawn_images import DrawnImages, Gathered, InPlace
from lit_knn.estimators.draws import Draws, per_draw, sq_error
from lit_knn.linalg.full_float32 import full_float32
from lit_knn.reference import Reference
from lit_knn.reference.gathered import fuses
from lit_knn.reference.streaming import GPU_FACTOR
from lit_knn.theory.proposal import Proposal
from lit_knn.theory.warp import Warp

# Bytes of float32 images that are gathered at a time on a CPU. Passes over the images are fastest if this number is
# near the size of the CPU's cache.
GATHER_BYTES = 4 * 2**20


class Certificate(NamedTuple):
    """An estimate of the posterior mean, with an estimate of its error.

    Attributes:
        mean: (B, *shape), the estimate of the posterior mean.
        effective_sample_size: (B,), float64, 1 / Σ w_i², between 1 and n.
        largest_weight: (B,), float64, max w_i.
        sq_error: (B,), float64, estimated squared error per dimension. It cannot see images that were not drawn: if one
            draw has all the weight, it is 0. It is infinite if the estimator cannot estimate the error.
    """

    mean: Tensor
    effective_sample_size: Tensor
    largest_weight: Tensor
    sq_error: Tensor


class CertifiedEstimator(Estimator):
    """An estimator that averages n weighted images and estimates its own error. Subclasses implement `_certify`."""

    n = Count(DEFAULT_N)
    """Number of images drawn for each z. Images may repeat, so n may exceed the size of the set."""

    @torch.no_grad()
    def certified_mean(
        self,
        z: Tensor,
        t: Tensor | float,
        x_source: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Certificate:
        """Compute `posterior_mean` together with an estimate of its error.

        The mean equals `posterior_mean` if the generator is in the same state. The error is the variance of Eq. 12
        (eq:SNIS_Var), with the weights of the draws in place of the posterior.
        """
        t = self._check(z, t, x_source, None, generator)
        if self._nothing_to_do(z):
            return Certificate(z.clone(), t, t, t)
        return self._checked_certificate(z, t, x_source, generator)

    def _checked_certificate(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Certificate:
        """Compute `certified_mean` with checked arguments, so that nothing waits for a GPU."""
        with torch.autocast(z.device.type, enabled=False), full_float32():
            source = None if x_source is None else x_source.clone()
            certificate = self._certify(z.clone(), t.clone(), source, generator)
        if not isinstance(certificate, Certificate) or any(part.shape != t.shape for part in certificate[1:]):
            raise InputError(f"{type(self).__name__}: needs a Certificate of {len(z)} rows in each of its parts")
        return certificate._replace(mean=self._check_mean(certificate.mean, z).to(z.dtype))

    @abstractmethod
    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Certificate:
        """Hook for `certified_mean`. Its arguments are checked."""


class SampledEstimator(CertifiedEstimator):
    """An estimator that draws n images for each z and averages them. Subclasses implement `_draw`."""

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. On a GPU, tries the kernels that read drawn images."""
        super().bind(reference)
        fuses(reference)
        return self

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self._average(self._draw(z, t, x_source, generator), z, t)

    def _average(self, draws: Draws, z: Tensor, t: Tensor) -> Tensor:
        """Average the drawn images of each z with their weights; (B, *shape)."""
        mu = torch.empty(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        for rows, images, weights, _ in self._weighted(draws, z, t):
            if isinstance(rows, slice):  # All rows at once.
                return images.mean(weights)
            mu[rows] = images.mean(weights).to(mu.dtype)
        return mu

    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Certificate:
        parts, order = [], []
        for rows, images, weights, draws in self._weighted(self._draw(z, t, x_source, generator), z, t):
            mean, single = images.mean(weights), per_draw(draws, weights)
            spread = 1 / (weights * single).sum(1), single.amax(1)
            parts.append(Certificate(mean, *spread, sq_error(draws, weights, images, mean)))
            order.append(rows)
        return in_order(parts, order)

    def _weighted(
        self, draws: Draws, z: Tensor, t: Tensor, warp: Warp | None = None
    ) -> Iterator[tuple[Tensor | slice, DrawnImages, Tensor, Draws]]:
        """Yield some rows of z, the images drawn for these b rows, their weights (b, p) and draws, in any order.

        With `warp`, the likelihoods are computed from the warped images.
        """
        for rows, images in drawn_images(self.reference, draws.ids, draws.used, draws.x_source, warp):
            part = draws.rows(rows, images.places)
            sq_dist = None if part.of_posterior else images.sq_dist(z[rows])
            yield rows, images, part.weights(sq_dist, t[rows]), part

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        mean = torch.empty_like(x_source)
        draws = self._draw(*warp.query(z, t, x_source, self.reference.mean()), x_source, generator)
        for rows, images, weights, _ in self._weighted(draws, z, t, warp):
            mean[rows] = images.mean(weights).to(mean.dtype)
        # The mean of warped images is the warped mean, so one resampling serves all n images.
        return warp.apply(mean)

    @abstractmethod
    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        """Draw the images of each z. The arguments are those of `_posterior_mean`."""


class NeighbourEstimator(SampledEstimator):
    """A sampling estimator whose proposal, Eq. 13 (eq:proposal), can be inspected. Subclasses implement `proposal`."""

    k: Any
    """Number of neighbours searched for each z."""

    @abstractmethod
    def proposal(self, z: Tensor, t: Tensor, x_source: Tensor | None = None) -> Proposal:
        """Return the proposal for z (B, *shape) at t (B,)."""


def in_order(parts: Sequence[Certificate], rows: Sequence[Tensor | slice]) -> Certificate:
    """Join the parts' certificates into one. `rows` has the row numbers of each part, together 0 to B − 1.

    A slice selects all rows, so that there is one part.
    """
    numbers = [part for part in rows if isinstance(part, Tensor)]
    if not numbers:
        return parts[0]
    position = torch.cat(numbers).argsort()
    return Certificate(*(torch.cat(part)[position] for part in zip(*parts, strict=True)))


def weight_spread(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the effective sample size and the largest weight, (B,) each, for weights (B, n) that sum to 1."""
    return 1 / weights.square().sum(1), weights.amax(1)


def drawn_images(
    reference: Reference,
    ids: Tensor,
    used: Tensor | None,
    x_source: Tensor | None = None,
    warp: Warp | None = None,
) -> Iterator[tuple[Tensor | slice, DrawnImages]]:
    """Yield rows and their images, which are gathered in bounded memory, or read in place on a GPU, all rows at once.

    `ids`, `used` and `x_source` are as in `gather_used`. Warped images are always gathered; `warp` has the B maps.
    """
    if warp is None and fuses(reference):
        yield slice(None), InPlace(*reference.fetch(_known(ids, used) if reference.sharded else ids), used, x_source)
        return
    for rows, x in gather_used(reference, ids, used, x_source):
        yield rows, Gathered(x, None if warp is None else warp.rows(rows))


def _known(ids: Tensor, used: Tensor | None) -> Tensor:
    """Replace the images of unused places by the first image of the row, which is fetched anyway."""
    if used is None:
        return ids
    return torch.where(torch.arange(ids.shape[1], device=ids.device) < used.unsqueeze(1), ids, ids[:, :1])


def gather_used(
    reference: Reference, ids: Tensor, used: Tensor | None, x_source: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows (b,), in any order, and the images of their used places, (b, places, *shape), in bounded memory.

    `ids` is (B, p). `used` (B,) counts the used places of each row, at least 1, which come first; None means all.
    `x_source` is as in `gather`, and excludes `used`. Rows with similar numbers of used places are gathered together,
    so that short rows are not padded to long ones.
    """
    every_row = torch.arange(len(ids), device=ids.device)
    if used is None:
        for part, x in gather(reference, ids, x_source):
            yield every_row[part], x
        return
    reference, ids = reference.fetch(_known(ids, used))
    size_class = used.double().log2().ceil().long()
    # Yield once even when empty, so that callers can `torch.cat`.
    for size in size_class.unique().tolist() or [0]:
        rows = every_row[size_class == size]
        for part, x in gather(reference, ids[rows, : 2**size]):
            yield rows[part], x


def gather(reference: Reference, ids: Tensor, x_source: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of `ids` (B, n) and their images, (b, n, *shape), in bounded memory. A given source comes first.

    With a sharded set, this process first fetches all images at once: each image once, in its stored type.
    """
    reference, ids = reference.fetch(ids)
    n = ids.shape[1] + (x_source is not None)
    budget = GATHER_BYTES if ids.device.type == "cpu" else GATHER_BYTES * GPU_FACTOR
    step = max(budget // (4 * n * reference.d), 1)
    # Yield once even when empty, so that callers can `torch.cat`.
    for start in range(0, max(len(ids), 1), step):
        rows = slice(start, start + step)
        x = reference.take(ids[rows])
        if x_source is not None:
            x = torch.cat([x_source[rows].unsqueeze(1).to(x.dtype), x], dim=1)
        yield rows, x
