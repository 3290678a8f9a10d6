"""The posterior mean of each pixel, given the pixels that the data's covariance relates to it."""

import math
from typing import NamedTuple, Self

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.memory import work_bytes
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.rounding import LEAST_LOG_WEIGHT, product_dtype
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import covariance_of

# Neighbouring pixels see nearly the same pixels. A tile of SIDE x SIDE pixels shares one product over the pixels that
# all of them see. Pixels that only some of them see are multiplied separately.
SIDE = 4


class Tile(NamedTuple):
    """Output pixels whose masks are alike. Pixels are numbered from 0 to d − 1."""

    pixels: Tensor  # (g,), output pixels
    common: Tensor  # (a,), pixels that all their masks contain
    others: Tensor  # (u,), pixels that some of their masks contain
    # (g, u), float32, whether the mask of each output pixel contains each of `others`
    masks: Tensor


class PCALocality(Estimator):
    """The posterior mean of each pixel, given the pixels that the Wiener filter uses for it.

    Row p of W(t) = C(C + t²I)⁻¹, with the covariance C of the data, shows how much the best linear denoiser uses each
    pixel of z for pixel p. The mask M_p holds the pixels whose weight is at least `threshold` times the row's largest
    weight. μ̂_p = Σ_n w_pn·x_np with w_pn ∝ exp(−Σ_{q ∈ M_p} (z_q − x_nq)²/2t²), over all N images: the analytical
    denoiser of Lukoianov et al. (arXiv:2509.09672). Different pixels may follow different images, so samples are not
    copies. It is deterministic. Its bias against the posterior mean over whole images makes it generalise.

    The public code (Analytic Diffusion Studio) averages its softmax over batches of images, and its threshold is a
    share of the largest of all weights W_pq/W_qq.

    Cost: at `bind`, the covariance and its decomposition, which the set keeps (8·d² bytes); at each noise level, a
    product of d × d matrices for the filter; for each z up to N·d² multiplications, fewer where neighbouring pixels
    have similar masks. All z of one noise level share a pass, so a batch with many noise levels is slow.

    Args:
        threshold: pixels below this share of the row's largest weight are left out; from 0 to 1. 0 keeps all pixels,
            which gives the posterior mean over whole images (`Exact`). The public code takes 0.02, and 0.05 for
            CIFAR-10.
    """

    deterministic = True

    def __init__(self, threshold: float = 0.02) -> None:
        if not 0 <= threshold <= 1:
            raise InputError(f"PCALocality: threshold must be from 0 to 1, got {threshold!r}")
        self.threshold = threshold
        self._last: tuple[float, torch.device, float, list[Tile]] | None = None

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        self._last = None
        covariance_of(reference)
        return self

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {"covariance": 8 * d * min(N, d), "masks": 4 * d * d}

    def _tiles(self, t: float) -> list[Tile]:
        """Return the masks at noise level t. Those of the last level are kept, because samplers repeat a level."""
        # Read the attribute once, because another thread may replace it.
        last = self._last
        if last is None or last[:3] != (t, self.reference.device, self.threshold):
            variances, basis = covariance_of(self.reference)
            # C·(C + t²I)⁻¹, the Wiener filter
            weights = ((basis * (variances / (variances + t**2))) @ basis.T).abs_()
            masks = weights >= self.threshold * weights.amax(1, keepdim=True)
            self._last = last = (
                t,
                self.reference.device,
                self.threshold,
                tiles_of(masks, self.reference.shape),
            )
        return last[3]

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        """Estimate the rows of each noise level together: (B, *shape), float64."""
        mean = torch.empty(z.shape, dtype=torch.float64, device=z.device)
        levels, level_of = t.flatten().unique(return_inverse=True)
        for number, level in enumerate(levels.tolist()):
            rows = (level_of == number).nonzero()[:, 0]
            of_level = local_means(self.reference, z[rows].flatten(1), level, self._tiles(level))
            mean[rows] = of_level.view(-1, *z.shape[1:])
        return mean


def tiles_of(masks: Tensor, shape: tuple[int, ...]) -> list[Tile]:
    """Group the pixels by place. `masks` is (d, d) bool: row p is the mask of pixel p."""
    number = torch.arange(len(masks), device=masks.device)
    plane = number.view(-1, *shape[-2:]) if len(shape) > 1 else number.view(1, 1, -1)
    tiles = []
    for band in plane.split(SIDE, dim=1):
        for block in band.split(SIDE, dim=2):
            for pixels in block.flatten(1):
                of_tile = masks[pixels]
                in_all = of_tile.all(0)
                common = in_all.nonzero()[:, 0]
                others = (of_tile.any(0) & ~in_all).nonzero()[:, 0]
                tiles.append(Tile(pixels, common, others, of_tile[:, others].float()))
    return tiles


def local_means(reference: ReferenceSet, z: Tensor, t: float, tiles: list[Tile]) -> Tensor:
    """Compute the posterior mean of each pixel given the pixels of its mask, over all images: (B, d) for z (B, d).

    The squares of z are the same for all n, so they cancel. Only products remain: Σ z_q·x_nq/t² − Σ x_nq²/2t². A
    running maximum, normaliser and weighted sum for each z and pixel bound the memory.

    Args:
        reference: the set of the images.
        z: (B, d).
        t: the noise level of all z.
        tiles: the masks of all pixels.
    """
    terms = max(len(tile.common) + len(tile.others) for tile in tiles)
    dtype = product_dtype(reference, z, t, terms)
    # Dividing first keeps float32 from overflowing at extreme t.
    z, half_precision = (z.double() / t / t).to(dtype), 0.5 / t / t
    shape = reference.d, len(z)
    maximum = torch.full(shape, -math.inf, dtype=torch.float64, device=z.device)
    # The weighted sum and the normaliser.
    sums = torch.zeros(reference.d, 2, len(z), dtype=torch.float64, device=z.device)
    rows = max(work_bytes(z.device) // (8 * max(reference.d, SIDE**2 * len(z))), 1)
    work = torch.empty(SIDE**2 * len(z) * min(rows, reference.N), dtype=dtype, device=z.device)
    for _, images in reference.chunks(rows):
        x = images.flatten(1).T.to(dtype).contiguous()
        half_squares = half_precision * x.square()
        for tile in tiles:
            log_weights = _log_weights(tile, z, x, half_squares, work)
            old = maximum[tile.pixels]
            new = torch.maximum(old, log_weights.amax(2))
            weights = (
                log_weights.sub_(new.to(dtype).unsqueeze(2)).clamp_(min=LEAST_LOG_WEIGHT).exp_()
            )
            values = x.index_select(0, tile.pixels)
            values = torch.stack([values, torch.ones_like(values)], 1)
            rescale = (old - new).exp().unsqueeze(1)
            sums[tile.pixels] = sums[tile.pixels] * rescale + torch.bmm(
                values, weights.transpose(1, 2)
            )
            maximum[tile.pixels] = new
    return (sums[:, 0] / sums[:, 1]).T


def _log_weights(tile: Tile, z: Tensor, x: Tensor, half_squares: Tensor, work: Tensor) -> Tensor:
    """Compute the log weights, (g, B, c), of c images x (d, c) for the pixels of a tile, except for a constant.

    `z` (B, d) is divided by t², `half_squares` is x²/2t², and `work` is memory for at least g·B·c numbers. On a CPU,
    new memory at each use would cost a fifth of the product's time.
    """
    masks, g = tile.masks.to(x.dtype), len(tile.pixels)
    # Every mask contains `common`: (B, c), without the rest.
    shared = z[:, tile.common] @ x.index_select(0, tile.common) - half_squares.index_select(
        0, tile.common
    ).sum(0)
    # One product for all z and all pixels of the tile.
    factors = (masks.unsqueeze(1) * z[:, tile.others]).flatten(0, 1)
    products = work[: len(factors) * x.shape[1]].view(len(factors), -1)
    torch.mm(factors, x.index_select(0, tile.others), out=products)
    products = products.view(g, len(z), -1)
    return products.add_(shared).sub_(
        (masks @ half_squares.index_select(0, tile.others)).unsqueeze(1)
    )
