"""What the sampling estimators share: gathering the drawn images and averaging them, in bounded memory."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.streaming import GPU_FACTOR
from lit_knn.posterior import direct_sq_dist, unnormalised_log_likelihood
from lit_knn.reference import ReferenceSet
from lit_knn.snis import snis_weights, weighted_mean

# Images gathered at a time on a CPU, as float32: near the size of its cache, where passes over them are cheapest.
GATHER_BYTES = 8 * 2**20


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


class WeightStatistics(NamedTuple):
    """How evenly the weights w of one estimate are spread.

    Attributes:
        effective_sample_size: (B,), float64, 1 / Σ w_i², between 1 and n.
        largest_weight: (B,), float64, max w_i.
    """

    effective_sample_size: Tensor
    largest_weight: Tensor


class SampledEstimator(Estimator):
    """An estimator that draws n images for each z and averages them; subclasses implement `_draw`."""

    n: int

    @torch.no_grad()
    def weight_statistics(
        self,
        z: Tensor,
        t: Tensor | float,
        x_source: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> WeightStatistics:
        """The weights behind `posterior_mean` with the same arguments and a generator in the same state."""
        t = self._check(z, t, x_source)
        with torch.autocast(z.device.type, enabled=False):
            draws = self._draw(z, t, x_source, generator)
            parts = [
                draws.weights(direct_sq_dist(z[rows], x), rows).double()
                for rows, x in _gather(self.reference, z, draws)
            ]
        weights = torch.cat(parts)
        return WeightStatistics(1 / weights.square().sum(1), weights.amax(1))

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        draws = self._draw(z, t, x_source, generator)
        mu = torch.empty(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        for rows, x in _gather(self.reference, z, draws):
            mu[rows] = weighted_mean(draws.weights(direct_sq_dist(z[rows], x), rows), x).to(mu.dtype)
        return mu

    @abstractmethod
    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        """Draw the images of each z; arguments as `_posterior_mean`."""


def check_count(owner: str, option: str, value: int) -> int:
    """Return `value` if it is an integer of at least 1.

    Raises:
        InputError: another type, or value < 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{owner}: {option} must be an integer, got {value!r}")
    if value < 1:
        raise InputError(f"{owner}: {option} must be at least 1, got {value}")
    return value


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


def _gather(reference: ReferenceSet, z: Tensor, draws: Draws) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of z and the images drawn for them, (b, n, *shape), the source first if there is one."""
    n = draws.ids.shape[1] + (draws.x_source is not None)
    budget = GATHER_BYTES if z.device.type == "cpu" else GATHER_BYTES * GPU_FACTOR
    step = max(budget // (4 * n * reference.d), 1)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        x = reference.gather(draws.ids[rows])
        if draws.x_source is not None:
            x = torch.cat([draws.x_source[rows].unsqueeze(1).to(x.dtype), x], dim=1)
        yield rows, x
