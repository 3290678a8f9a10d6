"""Converts images from model space to pixels."""

import torch
from torch import Tensor


def are_pictures(shape: tuple[int, ...]) -> bool:
    """Return whether images of this shape have 1 or 3 channels. Latents and vectors cannot be shown."""
    return len(shape) == 3 and shape[0] in (1, 3)


def to_uint8(images: Tensor) -> Tensor:
    """Convert model space to pixels: round((x + 1)·127.5), cut off at 0 and 255, uint8."""
    return torch.clamp((images + 1) * 127.5, 0, 255).round().to(torch.uint8)
