"""EDM's non-leaky augmentation: random affine maps whose parameters are told to the network (Karras et al. 2022)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_knn.errors import InputError

SCALE_STD = 0.2  # of log2 of the scale and of the anisotropy
SHIFT_STD = 0.125  # in units of the side


class Augmented(NamedTuple):
    """Augmented images.

    Attributes:
        images: (B, C, H, W), flipped, then warped.
        labels: (B, 9): x-flip, y-flip, log-scale, cos − 1 and sin of the rotation, the anisotropy along two axes, and
            the shift along two axes, all but the flips and the rotation in standard deviations; zeros for an image
            left as it was.
        flips: (B, 2), bool, whether the last axis and the one before were mirrored.
        warped: (B,), bool, whether anything but flips was applied.
    """

    images: Tensor
    labels: Tensor
    flips: Tensor
    warped: Tensor


class GeometricAugmentation:
    """Flips, then scaling, rotation, anisotropic scaling and translation, as EDM draws and labels them.

    The last four happen with probability `p` each; images are mirrored along x with probability 1/2 and along y with
    p/2. Non-leaky: the network is told what was done, and samples are drawn with labels of zero. Warped images are
    interpolated bilinearly with reflected borders, without EDM's supersampling.

    Args:
        p: probability of each transformation; EDM trains CIFAR-10 with 0.12. With 0 there is none, not even flips.

    Raises:
        InputError: p outside [0, 1].
    """

    label_dim = 9
    """Width of the labels, which the net's `augment_dim` must equal."""

    def __init__(self, p: float = 0.12) -> None:
        if not 0 <= p <= 1:
            raise InputError(f"GeometricAugmentation: p must be in [0, 1], got {p}")
        self.p = p

    def __call__(self, images: Tensor, generator: torch.Generator) -> Augmented:
        """Transform images (B, C, H, W) with randomness from `generator`, on their device."""
        if images.ndim != 4:
            raise InputError(f"GeometricAugmentation needs images (N, C, H, W), got shape {tuple(images.shape)}")
        batch, device = len(images), images.device

        def happens(probability: float) -> Tensor:
            return (torch.rand(batch, device=device, generator=generator) < probability).float()

        def normal() -> Tensor:
            return torch.randn(batch, device=device, generator=generator)

        def angle() -> Tensor:
            return (2 * torch.rand(batch, device=device, generator=generator) - 1) * math.pi

        x_flip = happens(0.5 if self.p > 0 else 0.0)
        y_flip = happens(0.5) * happens(self.p)
        scale = normal() * happens(self.p)
        rotation = angle() * happens(self.p)
        stretch, axis = normal() * happens(self.p), angle() * happens(0.5)
        shifted = happens(self.p)
        shift_x, shift_y = normal() * shifted, normal() * shifted
        columns = [x_flip, y_flip, scale, rotation.cos() - 1, rotation.sin()]
        labels = torch.stack([*columns, stretch * axis.cos(), stretch * axis.sin(), shift_x, shift_y], dim=1)
        flips, warped = labels[:, :2].bool(), labels[:, 2:].ne(0).any(dim=1)

        flipped = flip(images, flips)
        # The trainer's mixed precision would round the map, but not the labels that tell it.
        with torch.autocast(device.type, enabled=False):
            back = _unstretch(scale, scale) @ _rotation(rotation)
            back = back @ _rotation(-axis) @ _unstretch(stretch, -stretch) @ _rotation(axis)
            result = _warp(flipped, back, torch.stack([shift_x, shift_y], dim=1))
        return Augmented(torch.where(warped[:, None, None, None], result, flipped), labels, flips, warped)


def flip(images: Tensor, flips: Tensor) -> Tensor:
    """Mirror the last axis of each item of `images` (B, ..., H, W) where flips[:, 0], the one before where flips[:, 1].

    Its own inverse.
    """
    for column, axis in ((0, -1), (1, -2)):
        images = torch.where(flips[:, column].reshape(-1, *[1] * (images.ndim - 1)), images.flip(axis), images)
    return images


def _warp(images: Tensor, back: Tensor, shift: Tensor) -> Tensor:
    """The images whose value at place v is that of `images` at back·(v − shift·side), v in pixels from the centre."""
    height, width = images.shape[2:]
    # affine_grid's coordinates span 2 over a side.
    sides = torch.tensor([width / 2, height / 2], device=images.device)
    back = back * sides / sides[:, None]
    theta = torch.cat([back, -back @ (2 * SHIFT_STD * shift).unsqueeze(2)], dim=2)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _unstretch(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed((-SCALE_STD * torch.stack([x, y], dim=1)).exp2())


def _rotation(angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
