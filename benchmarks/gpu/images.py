"""Synthetic images for measurements: smooth random pictures of any number, made on the device."""

import math

import torch
from torch import Tensor

from lit_knn.common.rng import keyed_generator

# Images per draw of random numbers.
CHUNK = 8192
# Grey levels of one standard deviation of the pixels, about that of photographs.
CONTRAST = 60.0


def synthetic_images(N: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Make smooth random images: waves whose amplitude falls with their frequency, as in photographs.

    Args:
        N: number of images.
        shape: (C, H, W).
        device: where they are made and stay. Another device draws other numbers.

    Returns:
        (N, C, H, W), uint8.
    """
    channels, height, width = shape
    down, across = (_waves(size, device) for size in (height, width))
    frequency = torch.arange(height, device=device).unsqueeze(1) + torch.arange(
        width, device=device
    )
    amplitude = 1.0 / (1.0 + frequency)
    amplitude *= CONTRAST / amplitude.norm()
    images = torch.empty(N, *shape, dtype=torch.uint8, device=device)
    generator = keyed_generator(device, 0)
    for start in range(0, N, CHUNK):
        rows = images[start : start + CHUNK]
        coefficients = torch.randn(
            len(rows), channels, height, width, device=device, generator=generator
        )
        pictures = down.T @ (coefficients * amplitude) @ across
        rows.copy_((pictures + 127.5).round_().clamp_(0, 255))
    return images


def _waves(size: int, device: torch.device) -> Tensor:
    """Return the cosines of the discrete cosine transform, (frequency, place), of mean square 1."""
    place = (torch.arange(size, device=device) + 0.5) / size
    waves = torch.cos(math.pi * torch.arange(size, device=device).unsqueeze(1) * place)
    waves[1:] *= math.sqrt(2)
    return waves
