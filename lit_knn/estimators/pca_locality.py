"""The posterior mean of each pixel, given the pixels that the data's covariance relates to it."""

import math
from typing import NamedTuple, Self

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.memory import work_bytes
from lit_knn.common.transforms import outside_transforms
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.rounding import LEAST_LOG_WEIGHT, product_dtype
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import covariance_of

# Neighbouring pixels see nearly the same pixels. A tile of SIDE x SIDE pixels shares one product over the pixels that
# all of them see. Pixels that only some of them see are multiplied separately.
SIDE = 4


class Tile(NamedTuple):
    """A group of neighbouring output pixels, and the masks that say which pixels of z each of them uses.

    Pixels are numbered from 0 to d − 1.
    """

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
        # The last noise level, device and threshold, and their tiles.
        self._last: tuple[float, torch.device, float, list[Tile]] | None = None

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        self._last = None
        covariance_of(reference)
        return self

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {"covariance": 8 * d * min(N, d), "masks": 4 * d * d}

    def _tiles(self, t: float) -> list[Tile]:
        """Return the tiles at noise level t. Those of the last level are kept, because samplers repeat a level."""
        # Read the attribute once, because another thread may replace it.
        last = self._last
        if last is None or last[:3] != (t, self.reference.device, self.threshold):
            tiles = outside_transforms(lambda: self._tiles_at(t))
            last = (t, self.reference.device, self.threshold, tiles)
            self._last = last
        return last[3]

    def _tiles_at(self, t: float) -> list[Tile]:
        variances, basis = covariance_of(self.reference)
        # C·(C + t²I)⁻¹, the Wiener filter
        weights = ((basis * (variances / (variances + t**2))) @ basis.T).abs_()
        masks = weights >= self.threshold * weights.amax(1, keepdim=True)
        return tiles_of(masks, self.reference.shape)

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
    """Group the pixels by place.

    Args:
        masks: (d, d) bool: row p is the mask of pixel p.
        shape: the shape of an image.
    """
    number = torch.arange(len(masks), device=masks.device)
    # The pixels' numbers as planes (planes, H, W); a vector is one row of pixels.
    planes = number.view(-1, *shape[-2:]) if len(shape) > 1 else number.view(1, 1, -1)
    tiles = []
    for band in planes.split(SIDE, dim=1):
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

    The squares of z are the same for all images, so they cancel. The log weights that remain are
    Σ z_q·x_nq/t² − Σ x_nq²/2t². The images come in chunks. A maximum, a normaliser and a weighted sum of each z and
    pixel are kept over the chunks seen so far, so the memory stays bounded.

    Args:
        reference: the set of the images.
        z: (B, d).
        t: the noise level of all z.
        tiles: the masks of all pixels.
    """
    terms = max(len(tile.common) + len(tile.others) for tile in tiles)
    dtype = product_dtype(reference, z, t, terms)
    # Dividing first keeps float32 from overflowing at extreme t.
    z = (z.double() / t / t).to(dtype)
    half_inverse_noise = 0.5 / t / t
    maximum = torch.full((reference.d, len(z)), -math.inf, dtype=torch.float64, device=z.device)
    # The weighted sum and the normaliser.
    sums = torch.zeros(reference.d, 2, len(z), dtype=torch.float64, device=z.device)
    rows = max(work_bytes(z.device) // (8 * max(reference.d, SIDE**2 * len(z))), 1)
    work = torch.empty(SIDE**2 * len(z) * min(rows, reference.N), dtype=dtype, device=z.device)
    for _, images in reference.chunks(rows):
        x = images.flatten(1).T.to(dtype).contiguous()
        half_squares = half_inverse_noise * x.square()
        for tile in tiles:
            log_weights = _log_weights(tile, z, x, half_squares=half_squares, work=work)
            old = maximum[tile.pixels]
            new = torch.maximum(old, log_weights.amax(2))
            log_weights.sub_(new.to(dtype).unsqueeze(2))
            weights = log_weights.clamp_(min=LEAST_LOG_WEIGHT).exp_()

            # One product gives the weighted sum of the pixels' values, and with ones the sum of the weights.
            values = x.index_select(0, tile.pixels)
            values = torch.stack([values, torch.ones_like(values)], 1)
            # The sums so far are relative to the maximum before.
            rescale = (old - new).exp().unsqueeze(1)
            sums[tile.pixels] = sums[tile.pixels] * rescale + torch.bmm(
                values, weights.transpose(1, 2)
            )
            maximum[tile.pixels] = new
    return (sums[:, 0] / sums[:, 1]).T


def _log_weights(tile: Tile, z: Tensor, x: Tensor, half_squares: Tensor, work: Tensor) -> Tensor:
    """Compute the log weights of c images for the g pixels of a tile, up to a constant of each z: (g, B, c).

    Args:
        tile: the pixels and their masks.
        z: (B, d), latents divided by t².
        x: (d, c), the images.
        half_squares: (d, c), x²/2t².
        work: memory for at least g·B·c numbers. On a CPU, new memory at each use would cost a fifth of the product's
            time.
    """
    masks, g = tile.masks.to(x.dtype), len(tile.pixels)
    # The part of the pixels that every mask contains, (B, c).
    common_squares = half_squares.index_select(0, tile.common).sum(0)
    shared = z[:, tile.common] @ x.index_select(0, tile.common) - common_squares

    # The part of the other pixels, by one product for all z and all pixels of the tile. A factor is 0 outside the mask.
    factors = (masks.unsqueeze(1) * z[:, tile.others]).flatten(0, 1)
    products = work[: len(factors) * x.shape[1]].view(len(factors), -1)
    torch.mm(factors, x.index_select(0, tile.others), out=products)
    products = products.view(g, len(z), -1)
    other_squares = masks @ half_squares.index_select(0, tile.others)
    return products.add_(shared).sub_(other_squares.unsqueeze(1))
