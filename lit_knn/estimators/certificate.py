"""Estimators that average drawn images, and so can estimate the error of their mean."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lit_knn.estimators.base import Estimator
from lit_knn.estimators.checks import checked_mean, checked_query
from lit_knn.estimators.draws import Draws, ResultRows, drawn_images, weighted_mean, weights_of
from lit_knn.index.precision import full_float32
from lit_knn.reference import ReferenceSet
from lit_knn.reference.gathered import Images
from lit_knn.theory.warp import Warp


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
    """An estimator that draws images for each z and averages them, and so can estimate the error of its mean."""

    searches = False
    """Whether the draws come from the proposal of near images, Eq. 13 (eq:proposal)."""

    @abstractmethod
    def draw(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Draws:
        """Draw the images of each z.

        Args:
            z: (B, *shape).
            t: (B,).
            x_source: (B, *shape), or None.
            generator: source of randomness.
        """

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        """Average the draws with their weights, Eq. 11 (eq:SNIS_estimator), lines 6 to 8 of Algorithm 1."""
        t = t.flatten()
        return weighted_mean(self.reference, self.draw(z, t, x_source, generator), z, t)

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

        Args:
            z: (B, *shape), noisy latents.
            t: (B,) or scalar, noise level.
            x_source: as in `posterior_mean`.
            generator: as in `posterior_mean`.
        """
        query = checked_query(self, z, t, x_source, generator)
        if len(z) == 0 and not self.others_wait():
            t = query.t.flatten()
            return Certificate(z.clone(), t, t, t)

        with full_float32():
            certificate = self._call(self._certificate, query)
        return certificate._replace(mean=checked_mean(self, certificate.mean, z))

    def _certificate(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Certificate:
        """Hook for `certified_mean`, with the arguments of `_posterior_mean`."""
        t = t.flatten()
        draws = self.draw(z, t, x_source, generator)
        return certificate_of(self.reference, draws, z, t)


def warped_weighted_mean(
    estimator: DrawingEstimator,
    z: Tensor,
    t: Tensor,
    warp: Warp,
    x_source: Tensor,
    generator: Generator | None,
) -> Tensor:
    """Average warped images. This is the hook `_warped_mean` of estimators such as `KNN` and `STF`.

    Args:
        estimator: draws the images.
        z: (B, C, H, W).
        t: (B, 1, 1, 1).
        warp: B maps.
        x_source: (B, C, H, W), the images before warping.
        generator: source of randomness.

    Returns:
        (B, C, H, W), in the dtype of `x_source`.
    """
    t = t.flatten()
    near_z, near_t = warp.query(z, t, x_source, estimator.reference.mean())
    draws = estimator.draw(near_z, near_t, x_source if estimator.uses_source else None, generator)

    # The mean of warped images is the warped mean, so one resampling serves all n images.
    mean = weighted_mean(estimator.reference, draws, z, t, warp)
    return warp.apply(mean.to(x_source.dtype))


def certificate_of(reference: ReferenceSet, draws: Draws, z: Tensor, t: Tensor) -> Certificate:
    """Average independent draws like `weighted_mean`, and estimate the error of the mean.

    Args:
        reference: the set of the images.
        draws: the images of each z.
        z: (B, *shape).
        t: (B,).
    """
    results = ResultRows(len(z))
    for rows, images in drawn_images(reference, draws):
        weights = weights_of(draws, images, rows, z, t)
        mean = images.mean(weights)

        # `single` are weights of single draws, because one place may stand for several.
        single = weights
        if draws.copies is not None:
            single = weights / draws.copies[rows, : images.places].clamp(min=1)
        sample_size = 1 / (weights * single).sum(1)
        results.put(
            rows, mean, sample_size, single.amax(1), sq_error(weights, single, images, mean)
        )
    return Certificate(*results.columns)


def sq_error(weights: Tensor, single: Tensor, images: Images, mean: Tensor) -> Tensor:
    """Estimate the squared error per dimension of the mean of independent draws: (B,), float64.

    It is the variance of Eq. 12 (eq:SNIS_Var), with the weights of the draws in place of the posterior.

    Args:
        weights: (B, p), of the places.
        single: (B, p), of a single draw at each place.
        images: of the places.
        mean: (B, *shape).
    """
    sq_weights = weights * single
    # The mean comes from the same draws, so the plain sum would be too low. Dividing by `left` corrects it: for equal
    # weights the divisor n becomes the n − 1 of a sample variance.
    left = 1 - sq_weights.sum(1)
    variance = (sq_weights * images.sq_dist(mean.float())).sum(1) / left
    return torch.where(left > 0, variance, 0.0) / mean.shape[1:].numel()
