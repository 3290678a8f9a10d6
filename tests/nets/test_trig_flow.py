"""The tangent of a consistency function: closed forms of a Gaussian, and central differences."""

import numpy as np
import pytest
import torch
from torch import nn

from lit_knn.nets.trig_flow import TrigFlow
from tests.toys import rng

STD = 0.7  # of the Gaussian
SIGMA_DATA = 0.5


class Smooth(nn.Module):
    """A small smooth network in float64: a mix of sines of the pixels and the noise label."""

    def __init__(self, d=4):
        super().__init__()
        weights = torch.randn(3, d, d, generator=rng(5), dtype=torch.float64)
        self.first, self.label, self.last = nn.ParameterList([*0.5 * weights])

    def forward(self, x_scaled, noise_label, class_label=None):
        first, label, last = (each.to(x_scaled.dtype) for each in self.parameters())
        features = torch.sin(x_scaled @ first + noise_label[:, None] * label[0])
        return features @ last


def gaussian_output(x_scaled, noise_label):
    """F of the consistency function of N(0, STD²), f = z·STD/sqrt(STD² + σ²)."""
    sigma = torch.exp(4 * noise_label)[:, None]
    total = (sigma**2 + SIGMA_DATA**2).sqrt()
    z = x_scaled * total
    end = z * STD / (STD**2 + sigma**2).sqrt()
    cos, sin = SIGMA_DATA / total, sigma / total
    return (cos * cos * z - end) / (sin * SIGMA_DATA)


def test_gaussian_consistency_function_has_no_tangent():
    sigma = torch.logspace(-2.7, 2.9, 2000, dtype=torch.float64)
    x, noise = torch.randn(2, 2000, 64, generator=rng(), dtype=torch.float64)
    x, level = STD * x, sigma[:, None]
    z = x + level * noise
    latents = TrigFlow.of(z, sigma, SIGMA_DATA)
    mean = STD**2 / (STD**2 + level**2) * z
    assert latents.tangent(gaussian_output, mean).abs().max() < 1e-10

    # One sample x given z has the variance STD²σ²/(STD² + σ²), which ∂g/∂x multiplies.
    squared = latents.tangent(gaussian_output, x).square().mean(1)
    variance = STD**4 * (sigma**2 + SIGMA_DATA**2) / (STD**2 + sigma**2) ** 2
    ratio = (squared / variance).numpy()
    assert ratio.mean() == pytest.approx(1, abs=4 * np.sqrt(2 / ratio.size / 64))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_tangent_is_that_of_central_differences(share):
    net, (z, mean) = Smooth(), torch.randn(2, 20, 4, generator=rng(1), dtype=torch.float64)
    sigma = torch.logspace(-2, 2, 20, dtype=torch.float64)
    t, z = torch.atan(sigma / SIGMA_DATA)[:, None], z * (sigma**2 + 0.25).sqrt()[:, None]

    def output(x_scaled, noise_label):
        return -net(x_scaled, noise_label)

    def network(x_t, t):
        return output(x_t / SIGMA_DATA, (SIGMA_DATA * t.tan()).log().flatten() / 4)

    found = TrigFlow.of(z, sigma, SIGMA_DATA).tangent(output, mean, share)
    # x_t = cos(t)·x + sin(t)·ε, with ε from the mean of x.
    x_t = t.cos() * z
    velocity = t.cos() * (x_t - t.cos() * mean) / t.sin() - t.sin() * mean
    h = 1e-6 * t.cos() * t.sin()
    ahead, behind = (network(x_t + step * velocity, t + step) for step in (h, -h))
    moved = x_t + SIGMA_DATA * (ahead - behind) / (2 * h)
    error = SIGMA_DATA * network(x_t, t) - velocity
    expected = -(t.cos() ** 2) * error - share * t.cos() * t.sin() * moved
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
