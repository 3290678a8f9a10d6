"""The images that a sampling estimator draws for each z, and their weights."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lit_knn.estimators.drawn_images import TINY, DrawnImages
from lit_knn.reference import Reference
from lit_knn.theory.posterior import unnormalised_log_likelihood
from lit_knn.theory.snis import snis_weights
from lit_knn.theory.stratified import StratifiedDraws


class Draws(NamedTuple):
    """Images drawn for each z. Their weights are likelihoods times a correction, normalised.

    Attributes:
        ids: (B, p), the images; places from `used` on hold arbitrary ids.
        log_correction: (B, p), or (B, 1 + p) with a source, float64: logarithm of the factor that multiplies the
            likelihood; −inf at unused places.
        used: (B,), number of used places; None if all are used.
        multiplicity: (B, p), float64, number of independent draws that a place stands for; None if always 1.
        inclusion: (B, p), float64, probability that draws without repetition contain the image (1 if it is kept); None
            for independent draws.
        x_source: (B, *shape), one more image per z, placed before the drawn images; or None.
        of_posterior: whether the images are draws from the posterior; then the weights are the correction alone.
    """

    ids: Tensor
    log_correction: Tensor
    used: Tensor | None = None
    multiplicity: Tensor | None = None
    inclusion: Tensor | None = None
    x_source: Tensor | None = None
    of_posterior: bool = False

    def rows(self, rows: Tensor | slice, places: int) -> "Draws":
        """Select some rows and their first places, without the source, in order to compute their weights."""

        def some(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[rows, :places] if part.ndim == 2 else part[rows]

        ids, log_correction = self.ids[rows, :places], self.log_correction[rows, :places]
        optional = some(self.used), some(self.multiplicity), some(self.inclusion)
        return Draws(ids, log_correction, *optional, of_posterior=self.of_posterior)

    def weights(self, sq_dist: Tensor | None, t: Tensor) -> Tensor:
        """Return self-normalised weights, Eq. 11 (eq:SNIS_estimator), from the exact distances: (B, p), float64.

        Draws from the posterior need no distances.
        """
        if self.of_posterior:
            return snis_weights(self.log_correction, 0.0)
        assert sq_dist is not None
        return torch.softmax(unnormalised_log_likelihood(sq_dist, t).add_(self.log_correction), dim=1)


def joined_draws(parts: Sequence[Draws]) -> Draws:
    """Put the draws of several batches, made by the same kind of estimator, into one batch."""
    places = [part.ids.shape[1] for part in parts]
    most, sources = max(places), [part.x_source for part in parts]
    with_source = sources[0] is not None

    def padded(name: str, value: float) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        if values[0] is None:
            return None
        return torch.cat([pad(v, (0, most - p), value=value) for v, p in zip(values, places, strict=True)])

    ids, log_correction = padded("ids", 0), padded("log_correction", -torch.inf)
    assert ids is not None
    assert log_correction is not None
    counts = [
        p.ids.new_full((len(p.ids),), n) if p.used is None else p.used for p, n in zip(parts, places, strict=True)
    ]
    all_used = all(part.used is None and n == most for part, n in zip(parts, places, strict=True))
    return Draws(
        ids,
        log_correction,
        None if all_used else torch.cat(counts),
        padded("multiplicity", 0.0),
        padded("inclusion", 1.0),
        torch.cat([source for source in sources if source is not None]) if with_source else None,
        parts[0].of_posterior,
    )


def uniform_ids(reference: Reference, batch: int, n: int, generator: torch.Generator | None) -> Tensor:
    """Draw (batch, n) image ids uniformly, with replacement, on the device of the images."""
    return torch.randint(reference.N, (batch, n), device=reference.device, generator=generator)


def uniform_draws(ids: Tensor, x_source: Tensor | None = None) -> Draws:
    """Turn uniform draws `ids` (B, n) into `Draws`. A given source is weighted as if it were one of the draws."""
    places = ids.shape[1] + (x_source is not None)
    return Draws(ids, torch.zeros(len(ids), places, dtype=torch.float64, device=ids.device), x_source=x_source)


def merged_draws(ids: Tensor, log_correction: Tensor, of_posterior: bool = False) -> Draws:
    """Merge repeated images of independent draws, to gather each only once. At small t all draws are one image.

    `ids` is (B, n); `log_correction` is (B, n), float64, and equal for equal ids; `of_posterior` is as in `Draws`.
    """
    if ids.is_cuda:
        # A GPU reads a repeated image from its cache, faster than it finds the repetitions.
        return Draws(ids, log_correction, of_posterior=of_posterior)
    ids, order = ids.sort(1)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = new.cumsum(1) - 1
    multiplicity = torch.zeros_like(log_correction).scatter_add_(1, place, torch.ones_like(log_correction))
    merged = ids.scatter(1, place, ids)
    log_correction = log_correction.scatter(1, place, log_correction.gather(1, order)) + multiplicity.log()
    return Draws(merged, log_correction, new.sum(1), multiplicity, of_posterior=of_posterior)


def draws_without_repetition(draws: StratifiedDraws) -> Draws:
    """Turn stratified draws into `Draws`. A sampled image has the inclusion probability 1/correction."""
    # If the rest is nearly empty, rounding puts images into it that are sure to be drawn.
    inclusion = torch.where(draws.sampled, (-draws.log_correction).exp(), 1.0).clamp_(max=1.0)
    return Draws(draws.ids, draws.log_correction, draws.used, inclusion=inclusion)


def sq_error(draws: Draws, weights: Tensor, images: DrawnImages, mean: Tensor) -> Tensor:
    """Estimate the squared error per dimension of the mean of draws: (B,), float64.

    For independent draws it is the variance of Eq. 12 (eq:SNIS_Var), with their weights in place of the posterior. For
    draws without repetition it is Hájek's estimate s/(s − 1)·Σ (1 − π)·|c − c̄|² over the s images that are not kept.
    Each image has inclusion probability π and contributes c = w (x − μ̂); c̄ is the mean of c weighted by 1 − π. If
    s = 1, the estimate is (1 − π)·|c|².

    Args:
        draws: the draws of these rows.
        weights: (B, p), float64, normalised.
        images: the images at the places.
        mean: (B, *shape), their weighted mean.
    """
    # Unused places have no weight, and their distances may be infinite.
    sq_deviation = torch.where(weights > 0, images.sq_dist(mean.to(images.dtype)), 0.0)
    d = mean.shape[1:].numel()
    if draws.inclusion is None:
        sq_weights = weights * per_draw(draws, weights)
        # The mean comes from the same draws, so divide by `left`. For equal weights, this replaces n by the n − 1 of a
        # sample variance.
        left = 1 - sq_weights.sum(1)
        return torch.where(left > 0, (sq_weights * sq_deviation).sum(1) / left, 0.0) / d
    chance = 1 - draws.inclusion
    count, spread = (chance > 0).sum(1), (chance * weights.square() * sq_deviation).sum(1)
    total = images.deviation(chance * weights, mean).flatten(1).double()
    centred = (spread - total.square().sum(1) / chance.sum(1).clamp(min=TINY)).clamp(min=0)
    return torch.where(count > 1, centred * count / (count - 1).clamp(min=1), spread) / d


def per_draw(draws: Draws, weights: Tensor) -> Tensor:
    """Return the weight of one draw at each place, (B, p). A place may stand for several equal draws."""
    return weights if draws.multiplicity is None else weights / draws.multiplicity.clamp(min=1)
