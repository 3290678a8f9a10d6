"""The images that an estimator draws for some rows: gathered as float32, or left in the set where kernels read them."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.reference import ReferenceSet
from lit_knn.reference.gathered import gathered_mean, gathered_sq_dist
from lit_knn.theory.posterior import direct_sq_dist
from lit_knn.theory.snis import weighted_deviation, weighted_mean
from lit_knn.theory.warp import Warp

# This divisor replaces 0 where the numerator is 0 too.
TINY = 1e-300


class Gathered(NamedTuple):
    """Drawn images that were gathered.

    Attributes:
        x: (b, p, *shape), float32, the images of each row.
        warp: maps that are applied to the images before distances are measured, or None.
    """

    x: Tensor
    warp: Warp | None = None

    @property
    def places(self) -> int:
        """Number of images per row, p."""
        return self.x.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the images."""
        return self.x.dtype

    def sq_dist(self, z: Tensor) -> Tensor:
        """‖z − x‖² from z (b, *shape) to each image: (b, p), float64."""
        return direct_sq_dist(z, self.x if self.warp is None else self.warp.apply(self.x))

    def mean(self, weights: Tensor) -> Tensor:
        """Σ_i w_i x_i, (b, *shape), for weights (b, p) whose rows sum to 1."""
        return weighted_mean(weights, self.x)

    def deviation(self, weights: Tensor, centre: Tensor) -> Tensor:
        """Σ_i w_i (x_i − c), (b, *shape), for weights (b, p) >= 0 and c (b, *shape)."""
        return weighted_deviation(weights, self.x, centre)


class InPlace(NamedTuple):
    """Drawn images that stay in a local set on a GPU. Each method is one operation that reads them there.

    Attributes:
        reference: the set.
        ids: (b, n), the images of each row.
        used: (b,), number of used places of each row, which come first; None means all. Distances of other places are
            inf, and their weights do not count.
        x_source: (b, *shape), one more image of each row, placed first; or None.
    """

    reference: ReferenceSet
    ids: Tensor
    used: Tensor | None = None
    x_source: Tensor | None = None

    @property
    def places(self) -> int:
        """See `Gathered.places`."""
        return self.ids.shape[1] + (self.x_source is not None)

    @property
    def dtype(self) -> torch.dtype:
        """See `Gathered.dtype`."""
        return torch.float32

    def sq_dist(self, z: Tensor) -> Tensor:
        """See `Gathered.sq_dist`."""
        return gathered_sq_dist(self.reference, self.ids, z, self.used, self.x_source)

    def mean(self, weights: Tensor) -> Tensor:
        """See `Gathered.mean`."""
        return gathered_mean(self.reference, self.ids, weights, self.used, self.x_source)

    def deviation(self, weights: Tensor, centre: Tensor) -> Tensor:
        """See `Gathered.deviation`. The result is float64."""
        total = weights.sum(1, keepdim=True)
        mean = self.mean(weights / total.clamp(min=TINY))
        return total.reshape(-1, *[1] * (mean.ndim - 1)) * (mean - centre)


DrawnImages = Gathered | InPlace
