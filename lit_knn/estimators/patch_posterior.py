"""The posterior over patches at the same position, recombined by averaging."""

import math
from collections.abc import Iterator
from typing import Self

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.memory import work_bytes
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.patch_sizes import checked_sizes, sizes_of
from lit_knn.estimators.rounding import LEAST_LOG_WEIGHT, product_dtype
from lit_knn.estimators.windows import over_pixels, sliding_sums
from lit_knn.reference import ReferenceSet

# Maximum latents of one pass over the images. With more latents, only few images fit the cache at a time.
ITEMS = 128
# Maximum bytes of the running sums of one batch. Each further batch reads all images again.
STATE_BYTES = 512 * 2**20


class PatchPosterior(Estimator):
    """PSPC: the posterior mean of each patch of z over the images' patches at the same position.

    Each p×p window of z has its own posterior over the N images, softmax(−‖z_w − x_w‖²/2t²). Windows overlap, and each
    pixel is the average of the posterior means of the windows that hold it (Niedoba et al. 2024, arXiv 2411.19339). A
    window of the whole image gives `Exact`. The estimator is deterministic and reads the images twice. It costs about
    3·N·C·p products and 6·N·log₂ p additions per window.

    Args:
        size: edge p of the windows in pixels; or a table {noise level: edge}, from which each t takes the level nearest
            in log t; null for a table that `bind` computes from the covariance (`patch_sizes`). An edge between H and W
            is cut to the shorter side.

    Raises:
        InputError: at `bind`, a size above max(H, W), or data that are not images (C, H, W).
    """

    deterministic = True

    def __init__(self, size: int | dict[float, int] | None = None) -> None:
        # Called for the InputError that a wrong size raises.
        checked_sizes(size)
        # The option stays as it was given, so that `bind` to another set computes a null table again.
        self.size = size
        # The size of each noise level, known after `bind`. Other levels take the size of the nearest one in log t.
        self.sizes_in_use: dict[float, int] = {}

    def bind(self, reference: ReferenceSet) -> Self:
        """Check the sizes, or choose them by the spectrum of the images."""
        if len(reference.shape) != 3:
            raise InputError(
                f"PatchPosterior: needs images (C, H, W), got data of shape {reference.shape}"
            )
        sizes = checked_sizes(self.size)
        largest = max(reference.shape[1:])
        for size in (sizes or {}).values():
            if size > largest:
                raise InputError(
                    f"PatchPosterior: size={size} is more than {largest}, which sees a whole image"
                )

        super().bind(reference)
        self.sizes_in_use = sizes or sizes_of(reference)
        return self

    def memory(self, N: int, d: int) -> dict[str, int]:
        return {}

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None
    ) -> Tensor:
        """Estimate the rows of each patch size together: (B, C, H, W), float64."""
        t = t.flatten()
        sizes = self._sizes_at(t)
        mean = torch.empty_like(z, dtype=torch.float64)
        for size in sorted(set(sizes)):
            rows = [row for row, row_size in enumerate(sizes) if row_size == size]
            step = self._batch_of(size)
            for start in range(0, len(rows), step):
                part = torch.tensor(rows[start : start + step], device=z.device)
                mean[part] = self._mean_at(z[part], t[part], size)
        return mean

    def _batch_of(self, size: int) -> int:
        """Return how many latents a pass over the images serves, with patches of one size."""
        _, height, width = self.reference.shape
        windows = (height - min(size, height) + 1) * (width - min(size, width) + 1)
        # Two running values for each window and some arrays of pixels, 8 bytes a number.
        bytes_per_latent = 8 * (2 * windows + 4 * self.reference.d)
        return min(max(STATE_BYTES // bytes_per_latent, 1), ITEMS)

    def _sizes_at(self, t: Tensor) -> list[int]:
        """Return the size for each noise level. If all levels have one size, no value is read from the GPU."""
        sizes = self.sizes_in_use
        if len(sizes) == 1:
            return list(sizes.values()) * len(t)

        sizes_of_items = []
        for level in t.tolist():
            nearest = min(sizes, key=lambda other: abs(math.log(other / level)))
            sizes_of_items.append(sizes[nearest])
        return sizes_of_items

    def _mean_at(self, z: Tensor, t: Tensor, size: int) -> Tensor:
        """Estimate the mean with patches of one size. Returns float64, in the shape of z."""
        channels, height, width = self.reference.shape
        h, w = min(size, height), min(size, width)
        rows, columns = height - h + 1, width - w + 1
        dtype = product_dtype(self.reference, z, t.min(), h * w * channels)
        queries = scaled_latents(images_last(z), t, dtype)
        # Each window has its own normaliser, and a first pass over the images finds it. So the second pass can add the
        # weights of all windows that hold a pixel, and multiply the pixel once by their sum.
        maxima = torch.full((columns, rows, len(z), 1), -torch.inf, dtype=dtype, device=z.device)
        normalisers = torch.zeros_like(maxima, dtype=torch.float64)
        for x in self._chunks(len(z)):
            keys = with_half_squares(x, dtype)
            # The product with ones sums the weights over the images of the chunk.
            ones = x.new_ones(1, 1, x.shape[3]).expand(rows, -1, -1).mT
            for left, (maximum, normaliser) in enumerate(zip(maxima, normalisers, strict=True)):
                log_weights = _log_weights(queries, keys, left, h=h, w=w)
                new_maximum = torch.maximum(maximum, log_weights.amax(2, keepdim=True))
                weights = weights_of(log_weights, new_maximum)
                normaliser.mul_((maximum - new_maximum).exp_()).add_(torch.bmm(weights, ones))
                maximum.copy_(new_maximum)

        shares = normalisers.reciprocal_().float()
        total = torch.zeros(height, width * channels, len(z), dtype=torch.float64, device=z.device)
        for x in self._chunks(len(z)):
            keys, values = with_half_squares(x, dtype), x.flatten(1, 2)
            for left, (maximum, share) in enumerate(zip(maxima, shares, strict=True)):
                log_weights = _log_weights(queries, keys, left, h=h, w=w)
                weights = weights_of(log_weights, maximum).mul_(share)
                inside = slice(left * channels, (left + w) * channels)
                total[:, inside] += torch.bmm(values[:, inside], over_pixels(weights, h).mT)

        # Each pixel is the average over the windows that hold it.
        count = over_pixels(total.new_ones(rows, 1), h) * over_pixels(total.new_ones(columns), w)
        return total.unflatten(1, (width, channels)).permute(3, 2, 0, 1) / count

    def _chunks(self, items: int) -> Iterator[Tensor]:
        """Stream images (H, W, C, n), with n such that the log weights of a column of windows fit `work_bytes`."""
        channels, height, width = self.reference.shape
        floats = max(8 * height * items, height * width * (channels + 1))
        for _, x in self.reference.chunks(
            max(work_bytes(self.reference.device) // (8 * floats), 1)
        ):
            yield images_last(x)


def _log_weights(queries: Tensor, keys: Tensor, left: int, h: int, w: int) -> Tensor:
    """Compute the log weights of all images in the R windows of h × w pixels that begin at column `left`: (R, B, n).

    Args:
        queries: (H, W, C + 1, B), the `scaled_latents`.
        keys: (H, W, C + 1, n), images `with_half_squares`.
        left: first column of the windows.
        h: height of a window.
        w: width of a window.
    """
    columns = slice(left, left + w)
    # One product for each row of pixels, which up to h windows share.
    products = torch.bmm(queries[:, columns].flatten(1, 2).mT, keys[:, columns].flatten(1, 2))
    return sliding_sums(products, h)


def images_last(x: Tensor) -> Tensor:
    """Copy images (n, C, H, W) to (H, W, C, n), where a patch of all images is a few long runs of memory."""
    return x.permute(2, 3, 1, 0).contiguous()


def weights_of(log_weights: Tensor, maximum: Tensor) -> Tensor:
    """Return exp(log_weights − maximum) in float32. `log_weights` is overwritten."""
    return log_weights.sub_(maximum).float().clamp_(min=LEAST_LOG_WEIGHT).exp_()


def scaled_latents(z: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return latents (H, W, C, B) as (H, W, C + 1, B): z/t² and a channel 1/t².

    The product with `with_half_squares` of x is (z·x − x²/2)/t² in each pixel. Its sum over a window is the window's
    log weight −‖z_w − x_w‖²/2t², except for ‖z_w‖², which is the same for all x.

    Args:
        z: (H, W, C, B).
        t: (B,).
        dtype: of the result.
    """
    # Divided in float64, because float32 might not hold 1/t².
    return (torch.cat([z, torch.ones_like(z[:, :, :1])], 2).double() / t.square()).to(dtype)


def with_half_squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images (H, W, C, n) as (H, W, C + 1, n), with a channel −‖pixel‖²/2."""
    keys = x.new_empty(*x.shape[:2], x.shape[2] + 1, x.shape[3], dtype=dtype)
    keys[:, :, :-1] = x
    torch.sum(keys[:, :, :-1].square(), 2, out=keys[:, :, -1]).mul_(-0.5)
    return keys
