"""EDM's non-leaky augmentation: random affine maps whose parameters are told to the network (Karras et al. 2022)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_knn.errors import InputError

LABEL_DIM = 9
SCALE_STD = 0.2  # of log2 of the scale and of the anisotropy
TRANSLATE_STD = 0.125  # of the shift, in units of the side


class Augmented(NamedTuple):
    """Augmented images.

    Attributes:
        images: (B, C, H, W).
        labels: (B, 9): x-flip, y-flip, log-scale, cos − 1 and sin of the rotation, the anisotropy along two axes, and
            the shift along two axes; all zero for an image left as it was.
        changed: (B,), bool, whether anything was applied to the image.
    """

    images: Tensor
    labels: Tensor
    changed: Tensor


class GeometricAugmentation:
    """Flips, scaling, rotation, anisotropic scaling and translation, each with probability `p`.

    Non-leaky: the network is told what was done, and samples are drawn with labels of zero.

    Args:
        p: probability of each transformation; EDM trains CIFAR-10 with 0.12.

    Raises:
        InputError: p outside [0, 1].
    """

    def __init__(self, p: float = 0.12) -> None:
        if not 0 <= p <= 1:
            raise InputError(f"GeometricAugmentation: p must be in [0, 1], got {p}")
        self.p = p

    def __call__(self, images: Tensor, generator: torch.Generator) -> Augmented:
        """Transform images (B, C, H, W) with randomness from `generator`, on their device."""
        if images.ndim != 4:
            raise InputError(f"GeometricAugmentation needs images (N, C, H, W), got shape {tuple(images.shape)}")
        batch, device = len(images), images.device

        def chosen() -> Tensor:
            return (torch.rand(batch, device=device, generator=generator) < self.p).float()

        def normal(std: float) -> Tensor:
            return chosen() * std * torch.randn(batch, device=device, generator=generator)

        def angle() -> Tensor:
            return (2 * torch.rand(batch, device=device, generator=generator) - 1) * math.pi

        x_flip, y_flip = chosen(), chosen()
        log_scale = normal(SCALE_STD)
        rotation = chosen() * angle()
        stretch, axis = normal(SCALE_STD), angle()
        shift_x, shift_y = normal(TRANSLATE_STD), normal(TRANSLATE_STD)
        columns = [x_flip, y_flip, log_scale, rotation.cos() - 1, rotation.sin()]
        columns += [stretch * axis.cos(), stretch * axis.sin(), shift_x, shift_y]
        labels = torch.stack(columns, dim=1)

        linear = _flip(x_flip, y_flip) @ _stretch(log_scale, log_scale) @ _rotation(rotation)
        linear = linear @ _rotation(axis) @ _stretch(stretch, -stretch) @ _rotation(-axis)
        # affine_grid's coordinates span 2 over a side.
        shift = 2 * torch.stack([shift_x, shift_y], dim=1).unsqueeze(2)
        # The sampling grid maps places of the result back to places of the source.
        theta = torch.cat([torch.linalg.inv(linear), -shift], dim=2)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        warped = F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
        changed = labels.ne(0).any(dim=1)
        return Augmented(torch.where(changed[:, None, None, None], warped, images), labels, changed)


def _flip(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([1 - 2 * x, 1 - 2 * y], dim=1))


def _stretch(log2_x: Tensor, log2_y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([log2_x, log2_y], dim=1).exp2())


def _rotation(angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
