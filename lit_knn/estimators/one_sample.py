"""The one-sample estimator of diffusion and consistency training."""

from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.theory.warp import Warp


class OneSample(Estimator):
    """μ̂ = x, the clean x that z was made from: Eq. 9 (eq:simple_mc) with n = 1.

    It is unbiased over the draw of (x, z), with the variance of the whole posterior. It costs nothing and needs no
    reference set. It ignores labels, because x already belongs to the class.
    """

    needs_reference = False
    deterministic = True
    uses_source = True
    takes_labels = True
    shardable = True

    def _posterior_mean(
        self,
        z: Tensor,
        t: Tensor,
        x_source: Tensor | None,
        generator: Generator | None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return `x_source`."""
        if x_source is None:
            raise InputError("OneSample needs x_source, the clean x that z was made from")
        return x_source

    def _warped_mean(
        self,
        z: Tensor,
        t: Tensor,
        warp: Warp,
        x_source: Tensor,
        generator: Generator | None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return `x_source` warped."""
        return warp.apply(x_source)
