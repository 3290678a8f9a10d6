"""The one-sample estimator of diffusion and consistency training."""

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator


class OneSample(Estimator):
    """μ̂ = x, the clean x that z was made from: Eq. 9 (eq:simple_mc) with n = 1.

    Unbiased over the draw of (x, z), with the variance of the whole posterior. Free; needs no reference set.
    """

    needs_reference = False
    deterministic = True
    uses_source = True

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        if x_source is None:
            raise InputError("OneSample needs x_source, the clean x that z was made from")
        return x_source
