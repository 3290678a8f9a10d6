"""The mean over the nearest images alone."""

from typing import Self

import torch
from torch import Tensor

from lit_knn.estimators.base import Holdings
from lit_knn.estimators.counts import IMAGES, Count
from lit_knn.estimators.draws import Draws
from lit_knn.estimators.sampled import Certificate, SampledEstimator
from lit_knn.reference import Reference


class TopK(SampledEstimator):
    """The posterior mean (Eq. 8, eq:posterior_mean) over the k nearest images of each z, as if there were no others.

    It is deterministic and as biased as the weight of the images beyond the k nearest: nearly exact at small t, where
    few images have weight, and the plain mean of k near images as t → ∞. It is a baseline for `KNN`, which also draws
    from the other images. At k = N it is the exact mean. An approximate index may find other images or fewer, and then
    the mean is over those that it finds.

    Args:
        k: images per z; null for 256, or N if that is less.

    Raises:
        InputError: k < 1; at `bind`, k > N.
    """

    deterministic = True
    shardable = True

    k = Count(256, IMAGES)

    def __init__(self, k: int | None = None) -> None:
        self.k = k

    @property
    def n(self) -> int:  # type: ignore[override]
        """Number of images that are averaged: k."""
        return self.k

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Builds the neighbour index of the set."""
        super().bind(reference)
        reference.try_search(self.k)
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds the index."""
        return Holdings(neighbours=TopK.k.within(self, N, d))

    def _draw(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Draws:
        _, ids = self.reference.search(z, self.k)
        # An approximate index marks places that it could not fill by −1.
        log_correction = torch.zeros_like(ids, dtype=torch.float64).masked_fill_(ids < 0, -torch.inf)
        return Draws(ids.clamp(min=0), log_correction)

    def _certify(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None) -> Certificate:
        certificate = super()._certify(z, t, x_source, generator)
        # The error is that of the images that are left out, which no draw tells.
        return certificate._replace(sq_error=torch.full_like(certificate.sq_error, torch.inf))
