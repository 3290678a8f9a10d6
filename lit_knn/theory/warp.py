"""Affine warps of images: what augmentation does to an image, as a linear map that is each item's own."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Warp(NamedTuple):
    """One linear map A for each item of a batch: mirror the image, then resample it along an affine map.

    Each pixel of A x is an average of pixels of x (bilinear interpolation, reflected borders). So A is linear: the mean
    of warped images is the warped mean.

    Attributes:
        flips: (B, 2), bool, whether the last axis and the one before are mirrored.
        theta: (B, 2, 3), float, from places of the result to places of the mirrored image, in the coordinates of
            `torch.nn.functional.affine_grid`.
    """

    flips: Tensor
    theta: Tensor

    def rows(self, rows: Tensor | slice) -> "Warp":
        """The maps of some items."""
        return Warp(self.flips[rows], self.theta[rows])

    def apply(self, images: Tensor) -> Tensor:
        """A x, each map to all images of its item: (B, C, H, W) or (B, n, C, H, W) to the same shape."""
        return _resample(flip(images, self.flips), self.theta)

    def adjoint(self, images: Tensor) -> Tensor:
        """A'v of each item: (B, C, H, W) to the same shape; ⟨A'v, x⟩ = ⟨v, A x⟩."""
        pull_back = torch.func.vjp(self.apply, torch.zeros_like(images))[1]
        return pull_back(images)[0]

    def query(self, z: Tensor, t: Tensor, x_source: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """A latent of unwarped images whose posterior over the set is near that of `z` over the warped set.

        With x_s the source and Δ = x_i − x_s, −‖z − A x_i‖²/2t² is (⟨A'(z − A x_s), Δ⟩ − ‖AΔ‖²/2)/t² up to a constant.
        Only ‖AΔ‖² needs a resampling for each image. With ρ‖Δ‖² in its place, where ρ = ‖A(x_s − m)‖²/‖x_s − m‖² is
        the share that A leaves of the source's distance from the data mean m, this is −‖z' − x_i‖²/2t'² with
        z' = x_s + A'(z − A x_s)/ρ and t' = t/√ρ. Searching with the inverse map of z would find other images at small
        t, because interpolation has blurred the source.

        Args:
            z: (B, C, H, W), made from A x_source.
            t: (B,).
            x_source: (B, C, H, W), unwarped.
            mean: (d,), data mean.

        Returns:
            z' (B, C, H, W) and t' (B,).
        """
        centred = x_source - mean.reshape(x_source.shape[1:])
        before, after = (
            part.flatten(1).square().sum(1, dtype=torch.float64) for part in (centred, self.apply(centred))
        )
        # A source that is the mean, or that A maps to the mean's image, has no share to measure.
        share = torch.where((before > 0) & (after > 0), after / before, 1.0)
        noise = self.adjoint(z - self.apply(x_source))
        query = x_source + noise / share.to(noise.dtype).reshape(-1, *[1] * (z.ndim - 1))
        return query, t / share.sqrt()


def flip(images: Tensor, flips: Tensor) -> Tensor:
    """Mirror the last axis of each item of `images` (B, ..., H, W) where flips[:, 0], the one before where flips[:, 1].

    Its own inverse.
    """
    for column, axis in ((0, -1), (1, -2)):
        images = torch.where(flips[:, column].reshape(-1, *[1] * (images.ndim - 1)), images.flip(axis), images)
    return images


def _resample(images: Tensor, theta: Tensor) -> Tensor:
    """Bilinear interpolation at the places of `theta` (B, 2, 3), the same for all planes of an item."""
    if len(images) == 0:
        return images  # affine_grid refuses it
    # In half precision the places would be off by a tenth of a pixel, and not every device could resample.
    dtype = torch.promote_types(images.dtype, torch.float32)
    # All planes of an item share its grid, which is computed once.
    planes = images.flatten(1, -3).to(dtype)
    grid = F.affine_grid(theta.to(dtype), list(planes.shape), align_corners=False)
    result = F.grid_sample(planes, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return result.reshape(images.shape).to(images.dtype)
