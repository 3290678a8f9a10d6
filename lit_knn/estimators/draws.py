"""The images that a sampling estimator draws for each z, and what their weights are."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.reference import Reference
from lit_knn.theory.posterior import direct_sq_dist, unnormalised_log_likelihood
from lit_knn.theory.snis import snis_weights, weighted_deviation
from lit_knn.theory.stratified import StratifiedDraws

# Divides where there is nothing to divide.
TINY = 1e-300


class Draws(NamedTuple):
    """Images drawn for each z. Their weights are likelihoods times a correction, normalised.

    Attributes:
        ids: (B, p), the images; places from `used` on hold any.
        log_correction: (B, p), or (B, 1 + p) with a source: logarithm of what multiplies the likelihood in the weight,
            float64; −inf at places that are not used.
        used: (B,), number of used places; None for all.
        multiplicity: (B, p), how many independent draws a place stands for, float64; None for one each.
        inclusion: (B, p), probability that the image is among draws without repetition, 1 of a kept one, float64;
            None for independent draws.
        x_source: (B, *shape), one more image for each z, put in front of the drawn ones, or None.
        of_posterior: whether the posterior itself drew: weights are then the correction alone.
    """

    ids: Tensor
    log_correction: Tensor
    used: Tensor | None = None
    multiplicity: Tensor | None = None
    inclusion: Tensor | None = None
    x_source: Tensor | None = None
    of_posterior: bool = False

    def rows(self, rows: Tensor, places: int) -> "Draws":
        """What weighs the images of some rows and first places; the source is not handed on."""

        def some(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[rows, :places] if part.ndim == 2 else part[rows]

        ids, log_correction = self.ids[rows, :places], self.log_correction[rows, :places]
        optional = some(self.used), some(self.multiplicity), some(self.inclusion)
        return Draws(ids, log_correction, *optional, of_posterior=self.of_posterior)

    def weights(self, sq_dist: Tensor, t: Tensor) -> Tensor:
        """Self-normalised weights, Eq. 11 (eq:SNIS_estimator): (B, p), float64, from the exact distances."""
        log_p = torch.zeros_like(sq_dist) if self.of_posterior else unnormalised_log_likelihood(sq_dist, t)
        return snis_weights(log_p, -self.log_correction)


def uniform_ids(reference: Reference, batch: int, n: int, generator: torch.Generator | None) -> Tensor:
    """(batch, n) independent uniform draws of image ids, with replacement, where the images are."""
    return torch.randint(reference.N, (batch, n), device=reference.device, generator=generator)


def uniform_draws(ids: Tensor, x_source: Tensor | None = None) -> Draws:
    """Draws of the uniform proposal, and a source, which is weighted as if it were one of them.

    Args:
        ids: (B, n), the draws.
        x_source: as in `Draws`.
    """
    places = ids.shape[1] + (x_source is not None)
    return Draws(ids, torch.zeros(len(ids), places, dtype=torch.float64, device=ids.device), x_source=x_source)


def merged_draws(ids: Tensor, log_correction: Tensor, of_posterior: bool = False) -> Draws:
    """Independent draws with each image once, so that it is gathered once: at small t all draws are one image.

    Args:
        ids: (B, n), the draws.
        log_correction: (B, n), float64, equal for equal ids.
        of_posterior: as in `Draws`.
    """
    ids, order = ids.sort(1)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = new.cumsum(1) - 1
    multiplicity = torch.zeros_like(log_correction).scatter_add_(1, place, torch.ones_like(log_correction))
    merged = ids.scatter(1, place, ids)
    log_correction = log_correction.scatter(1, place, log_correction.gather(1, order)) + multiplicity.log()
    return Draws(merged, log_correction, new.sum(1), multiplicity, of_posterior=of_posterior)


def draws_without_repetition(draws: StratifiedDraws) -> Draws:
    """Kept and sampled images; what a sampled one stands for is one over the probability that it is sampled."""
    inclusion = torch.where(draws.sampled, (-draws.log_correction).exp(), 1.0)
    return Draws(draws.ids, draws.log_correction, draws.used, inclusion=inclusion)


def sq_error(draws: Draws, weights: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """Estimated squared error per dimension of the mean of draws: (B,), float64.

    Independent draws have the variance of Eq. 12 (eq:SNIS_Var) with their weights in the place of the posterior. Draws
    without repetition have Hájek's: s/(s − 1)·Σ (1 − π)·|c − c̄|² over the s images that are not kept, with inclusion
    probabilities π, contributions c = w (x − μ̂), and c̄ their mean weighted by 1 − π. Of a single one c itself is taken.

    Args:
        draws: of these rows.
        weights: (B, p), float64, normalised.
        x: (B, p, *shape).
        mean: (B, *shape), their weighted mean.
    """
    sq_deviation, d = direct_sq_dist(mean.to(x.dtype), x), mean.shape[1:].numel()
    if draws.inclusion is None:
        sq_weights = weights * per_draw(draws, weights)
        # The mean is itself that of the draws: for equal weights this is the n − 1 of a sample variance.
        left = 1 - sq_weights.sum(1)
        return torch.where(left > 0, (sq_weights * sq_deviation).sum(1) / left, 0.0) / d
    chance = 1 - draws.inclusion
    count, spread = (chance > 0).sum(1), (chance * weights.square() * sq_deviation).sum(1)
    total = weighted_deviation(chance * weights, x, mean).flatten(1).double()
    centred = (spread - total.square().sum(1) / chance.sum(1).clamp(min=TINY)).clamp(min=0)
    return torch.where(count > 1, centred * count / (count - 1).clamp(min=1), spread) / d


def per_draw(draws: Draws, weights: Tensor) -> Tensor:
    """The weight of each of the draws that a place stands for, (B, p)."""
    return weights if draws.multiplicity is None else weights / draws.multiplicity.clamp(min=1)
