"""EDM's non-leaky augmentation (Karras et al. 2022): random affine maps, whose parameters the network gets as input."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.common.memory import to_device
from lit_knn.theory.warp import Warp, flip

SCALE_STD = 0.2  # standard deviation of log2(scale) and of log2(anisotropy)
SHIFT_STD = 0.125  # standard deviation of the shift, in units of the side


class Augmented(NamedTuple):
    """Augmented images.

    Attributes:
        images: (B, C, H, W), flipped, then warped.
        labels: (B, 9): x-flip, y-flip, log-scale, cos − 1 and sin of the rotation, anisotropy along two axes, shift
            along two axes; scale, anisotropy and shift in standard deviations. An unchanged image has zeros.
        warped: (B,), bool: True if the image was changed by more than flips. It may be on the CPU.
        warp: the map from each given image to its augmented image.
    """

    images: Tensor
    labels: Tensor
    warped: Tensor
    warp: Warp


class GeometricAugmentation:
    """Flips images, then scales, rotates, stretches and shifts them. The random draws and the labels follow EDM.

    Each of the last four happens with probability `p`. Images are mirrored along x with probability 1/2 and along y
    with p/2. The augmentation is non-leaky: the network gets the labels, and samples are drawn with labels of zero.
    Warped images are interpolated bilinearly with reflected borders, without EDM's supersampling.

    Args:
        p: probability of each transformation; EDM trains CIFAR-10 with 0.12. With 0 there are no flips either.
    """

    label_dim = 9
    """Width of the labels; the net's `augment_dim` must be equal to it."""

    def __init__(self, p: float = 0.12) -> None:
        if not 0 <= p <= 1:
            raise InputError(f"GeometricAugmentation: p must be in [0, 1], got {p}")
        self.p = p

    def __call__(self, images: Tensor, generator: torch.Generator) -> Augmented:
        """Transform images (B, C, H, W) with randomness from `generator`, on their device or on the CPU.

        With images on a GPU and a generator of the CPU, the CPU knows `warped` without waiting for the GPU.
        """
        if images.ndim != 4:
            raise InputError(
                f"GeometricAugmentation needs images (N, C, H, W), got shape {tuple(images.shape)}"
            )
        batch, device = len(images), generator.device

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
        columns += [stretch * axis.cos(), stretch * axis.sin(), shift_x, shift_y]
        labels = torch.stack(columns, dim=1)
        warped = labels[:, 2:].ne(0).any(dim=1)

        # Mixed precision would round the map but not the labels, so the labels would be those of another map.
        with torch.autocast(images.device.type, enabled=False):
            # The map from the result back to the image, from which each pixel of the result is interpolated.
            back = _unstretch(scale, scale) @ _rotation(rotation)
            back = back @ _rotation(-axis) @ _unstretch(stretch, -stretch) @ _rotation(axis)
            theta = _theta(back, torch.stack([shift_x, shift_y], dim=1), images.shape[2:])

            labels = to_device(labels, images.device)
            changed = to_device(warped, images.device)
            warp = Warp(labels[:, :2].bool(), to_device(theta, images.device))
            result = warp.apply(images)

        # Resampling rounds pixels even where the map is the identity, so images that are not warped are only flipped.
        result = torch.where(changed[:, None, None, None], result, flip(images, warp.flips))
        return Augmented(result, labels, warped, warp)


def check_labels(
    augmentation: GeometricAugmentation | None, net: nn.Module, time_labels: int = 0
) -> None:
    """Raise InputError if the net takes another number of labels than it gets.

    Args:
        augmentation: gives labels, or None.
        net: takes `augment_dim` labels.
        time_labels: labels that hold a second time, see `LitMeanFlow`.
    """
    name, labels = "null", 0
    if augmentation is not None:
        name, labels = type(augmentation).__name__, augmentation.label_dim

    augment_dim = getattr(net, "augment_dim", 0)
    if labels + time_labels != augment_dim:
        problem = f"augmentation={name} gives {labels} labels"
        if time_labels:
            problem += f" and the second time {time_labels}"
        raise InputError(f"{problem}, but the net has augment_dim={augment_dim}")


def _theta(back: Tensor, shift: Tensor, sides: torch.Size) -> Tensor:
    """Return the map v -> back·(v − shift·side) in the coordinates of `affine_grid`, (B, 2, 3).

    Args:
        back: (B, 2, 2), the linear map that takes a position in the result to its position in the image; positions v
            are in pixels from the centre.
        shift: (B, 2), in units of `SHIFT_STD` sides.
        sides: height and width of the images.
    """
    height, width = sides
    # In affine_grid's coordinates a side has length 2.
    scale = torch.stack([torch.full((), side / 2, device=back.device) for side in (width, height)])
    back = back * scale / scale[:, None]
    return torch.cat([back, -back @ (2 * SHIFT_STD * shift).unsqueeze(2)], dim=2)


def _unstretch(x: Tensor, y: Tensor) -> Tensor:
    """Return the matrices that undo a scaling by 2^(SCALE_STD·x) and 2^(SCALE_STD·y) along the axes, (B, 2, 2)."""
    return torch.diag_embed((-SCALE_STD * torch.stack([x, y], dim=1)).exp2())


def _rotation(angle: Tensor) -> Tensor:
    """Return the matrices of rotations by angles (B,) in radians, (B, 2, 2)."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
