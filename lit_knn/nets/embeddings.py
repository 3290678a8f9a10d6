"""Noise embeddings of the published diffusion networks."""

import math

import torch
from torch import Tensor, nn


class PositionalEmbedding(nn.Module):
    """Cosines and sines of the noise label at frequencies from 1 down to 1/10,000 (Vaswani et al. 2017).

    `features` is even; without `endpoint` the lowest frequency is one step above 1/10,000.
    """

    def __init__(self, features: int, *, endpoint: bool, sines_first: bool) -> None:
        super().__init__()
        self.features = features
        self.endpoint = endpoint
        self.sines_first = sines_first

    def forward(self, noise_label: Tensor) -> Tensor:
        """Map (B,) to (B, features) float32."""
        half = self.features // 2
        numbers = torch.arange(half, dtype=torch.float32, device=noise_label.device)
        # True counts as 1. The last exponent is then 1, and without `endpoint` it is one step less.
        exponents = numbers / (half - self.endpoint)
        angles = noise_label.float()[:, None] * (1 / 10_000) ** exponents

        if self.sines_first:
            return torch.cat([angles.sin(), angles.cos()], 1)
        return torch.cat([angles.cos(), angles.sin()], 1)


class FourierEmbedding(nn.Module):
    """Sines and cosines of the noise label at fixed Gaussian frequencies, of standard deviation `scale` per unit.

    `features` is even (Tancik et al. 2020).
    """

    freqs: Tensor

    def __init__(self, features: int, *, scale: float) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.randn(features // 2) * scale)

    def forward(self, noise_label: Tensor) -> Tensor:
        """Map (B,) to (B, features) float32."""
        angles = noise_label.float()[:, None] * (2 * math.pi * self.freqs.float())
        return torch.cat([angles.sin(), angles.cos()], 1)
