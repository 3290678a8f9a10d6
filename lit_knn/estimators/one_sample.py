"""The one-sample estimator of diffusion and consistency training."""

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.theory.warp import Warp


class OneSample(Estimator):
    """μ̂ = x, the clean x that z was made from: Eq. 9 (eq:simple_mc) with n = 1.

    Unbiased over the draw of (x, z), with the variance of the whole posterior. Free; needs no reference set, and no
    labels, for x is of the class already.
    """

    needs_reference = False
    deterministic = True
    uses_source = True
    can_warp = True

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        if x_source is None:
            raise InputError("OneSample needs x_source, the clean x that z was made from")
        return x_source

    def _class_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None, labels: Tensor
    ) -> Tensor:
        return self._posterior_mean(z, t, x_source, generator)

    def _warped_mean(
        self, z: Tensor, t: Tensor, warp: Warp, x_source: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        return warp.apply(x_source)
