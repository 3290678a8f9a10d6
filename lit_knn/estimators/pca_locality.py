"""The posterior mean of each pixel in the part of the image that the data's covariance relates to it."""

from typing import Self

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator, Holdings
from lit_knn.estimators.local_sums import Tile, local_means, tiles_of
from lit_knn.reference import Reference
from lit_knn.reference.covariance import covariance_of


class Masks:
    """The pixels that the Wiener filter of a set uses for each pixel.

    Args:
        reference: the set that gives the covariance.
        threshold: see `PCALocality`.
    """

    def __init__(self, reference: Reference, threshold: float) -> None:
        self.reference, self.threshold = reference, threshold
        self._last: tuple[float, torch.device, list[Tile]] | None = None

    def at(self, t: float) -> Tensor:
        """Return the masks of all pixels at noise level t: (d, d) bool, row p is the mask of pixel p."""
        weights = covariance_of(self.reference).wiener_filter(t).abs_()
        return weights >= self.threshold * weights.amax(1, keepdim=True)

    def tiles(self, t: float) -> list[Tile]:
        """Return the masks as tiles. Those of the last level are kept, because samplers repeat it."""
        # Read once: another thread may put another level there.
        last = self._last
        if last is None or last[:2] != (t, self.reference.device):
            last = t, self.reference.device, tiles_of(self.at(t), self.reference.shape)
            self._last = last
        return last[2]


class PCALocality(Estimator):
    """The posterior mean of each pixel, given the pixels that the Wiener filter uses for it.

    Row p of W(t) = C(C + t²I)⁻¹, with the covariance C of the data, tells how much the best linear denoiser uses each
    pixel of z for pixel p. The mask M_p holds the pixels whose weight is at least `threshold` times the largest of the
    row. μ̂_p = Σ_n w_pn·x_np with w_pn ∝ exp(−Σ_{q ∈ M_p} (z_q − x_nq)²/2t²), over all N images: the analytical
    denoiser of Lukoianov et al. (arXiv:2509.09672). Different pixels may follow different images, so samples are not
    copies. It is deterministic; its bias against the posterior mean over whole images is what makes it generalise.

    Two things differ from the public code (Analytic Diffusion Studio). Its softmax is averaged over batches of images,
    and depends on their size; this one is over the whole set. Its threshold is a share of the largest of all weights
    W_pq/W_qq, so that one pixel that is nearly constant can empty all masks. A share of each row's largest weight
    needs no such division. `docs/analytic.md` compares both.

    Cost: at `bind`, the covariance and its decomposition, which the set keeps (8·d² bytes); at each noise level, a
    product of d × d matrices for the filter; for each z up to N·d² multiplications, fewer where neighbouring pixels
    have similar masks. All z of one noise level share a pass, so noise levels that all differ are slow.

    Args:
        threshold: share of a row's largest weight below which a pixel is left out, from 0 to 1. 0 keeps all pixels,
            which gives the posterior mean over whole images (`Exact`). The public code takes 0.02, and 0.05 for
            CIFAR-10.

    Raises:
        InputError: threshold outside [0, 1].
    """

    deterministic = True

    def __init__(self, threshold: float = 0.02) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise InputError(f"PCALocality: threshold must be from 0 to 1, got {threshold!r}")
        self.threshold = threshold
        self._masks: Masks | None = None

    def bind(self, reference: Reference) -> Self:
        """See `Estimator.bind`. Computes the covariance of the images."""
        super().bind(reference)
        self._masks = Masks(reference, self.threshold)
        covariance_of(reference)
        return self

    def holds(self, N: int, d: int, pixels: bool, device: torch.device) -> Holdings:
        """See `Estimator.holds`. The estimator holds the covariance's axes, and the masks of one noise level."""
        return Holdings(arrays={"covariance": 8 * d * min(N, d), "masks": 4 * d * d})

    def masks(self, t: float) -> Tensor:
        """Return the masks of all pixels at noise level t: (d, d) bool, row p is the mask of pixel p."""
        assert self._masks is not None
        return self._masks.at(t)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        assert self._masks is not None
        mean = torch.empty(z.shape, dtype=torch.float64, device=z.device)
        levels, level_of = t.unique(return_inverse=True)
        for number, level in enumerate(levels.tolist()):
            rows = (level_of == number).nonzero()[:, 0]
            own = local_means(self.reference, z[rows].flatten(1), level, self._masks.tiles(level))
            mean[rows] = own.view(-1, *z.shape[1:])
        return mean
