"""Affine warps of images: an augmentation that is a linear map, with one map for each item of a batch."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_knn.theory.noise import per_item


class Warp(NamedTuple):
    """One linear map A for each item of a batch: mirror the image, then resample it along an affine map.

    Each pixel of A x is an average of pixels of x (bilinear interpolation, reflected borders). So A is linear: the mean
    of warped images is the warped mean.

    Attributes:
        flips: (B, 2), bool, whether to mirror the last axis (W) and the axis before it (H).
        theta: (B, 2, 3), float, affine map from positions in the result to positions in the mirrored image, in the
            coordinates of `torch.nn.functional.affine_grid`.
    """

    flips: Tensor
    theta: Tensor

    def rows(self, rows: Tensor | slice) -> "Warp":
        """Select the maps of some items."""
        return Warp(self.flips[rows], self.theta[rows])

    def apply(self, images: Tensor) -> Tensor:
        """Apply each map to all images of its item: (B, C, H, W) or (B, n, C, H, W) to the same shape."""
        return _resample(flip(images, self.flips), self.theta)

    def adjoint(self, images: Tensor) -> Tensor:
        """Apply the adjoint A' to each item, (B, C, H, W) to the same shape. A' is defined by ⟨A'v, x⟩ = ⟨v, A x⟩."""
        # The vector-Jacobian product of a linear map is its adjoint.
        adjoint = torch.func.vjp(self.apply, torch.zeros_like(images))[1]
        return adjoint(images)[0]

    def query(self, z: Tensor, t: Tensor, x_source: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Find z' (B, C, H, W) and t' (B,) whose posterior over the plain set is near that of z over the warped set.

        x_s is the source and Δ = x_i − x_s. Up to a constant, −‖z − A x_i‖²/2t² = (⟨A'(z − A x_s), Δ⟩ − ‖AΔ‖²/2)/t².
        Only ‖AΔ‖² needs a resampling per image, so ρ‖Δ‖² replaces it. A keeps the share ρ = ‖A(x_s − m)‖²/‖x_s − m‖² of
        the source's squared distance from the data mean m. The result is −‖z' − x_i‖²/2t'² with
        z' = x_s + A'(z − A x_s)/ρ and t' = t/√ρ. The inverse map, applied to z, would find other images at small t,
        because interpolation blurs the source.

        Args:
            z: (B, C, H, W), made from A x_source.
            t: (B,).
            x_source: (B, C, H, W), unwarped.
            mean: (d,), data mean.
        """
        centred = x_source - mean.reshape(x_source.shape[1:])
        before = _sq_norms(centred)
        after = _sq_norms(self.apply(centred))
        # The share is undefined if the source equals the mean, or if A maps both to the same image.
        share = torch.where((before > 0) & (after > 0), after / before, 1.0)
        noise = self.adjoint(z - self.apply(x_source))
        query = x_source + noise / per_item(share.to(noise.dtype), z)
        return query, t / share.sqrt()


def _sq_norms(images: Tensor) -> Tensor:
    """Return the squared norm of each image (B, *shape), (B,) float64."""
    return images.flatten(1).square().sum(1, dtype=torch.float64)


def flip(images: Tensor, flips: Tensor) -> Tensor:
    """Mirror `images` (B, ..., H, W) along W where flips[:, 0], and H where flips[:, 1]. A second call undoes this."""
    for column, axis in ((0, -1), (1, -2)):
        is_flipped = flips[:, column].reshape(-1, *[1] * (images.ndim - 1))
        images = torch.where(is_flipped, images.flip(axis), images)
    return images


def _resample(images: Tensor, theta: Tensor) -> Tensor:
    """Interpolate bilinearly at the positions that `theta` (B, 2, 3) gives. All planes of an item share these."""
    if len(images) == 0:
        return images  # affine_grid refuses an empty batch
    # In half precision the positions would be off by a tenth of a pixel, and some devices cannot resample.
    dtype = torch.promote_types(images.dtype, torch.float32)
    # Compute the grid once for all planes of an item.
    planes = images.flatten(1, -3).to(dtype)
    grid = F.affine_grid(theta.to(dtype), list(planes.shape), align_corners=False)
    result = F.grid_sample(
        planes, grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )
    return result.reshape(images.shape).to(images.dtype)
