"""A Gaussian data set whose probability flow is known in closed form, and the order of an error."""

import math

import numpy as np
import torch

# Data N(M, S² I): the PF-ODE keeps (y − M) / sqrt(S² + σ²) with y = z/s.
M, S = 0.7, 0.5


def gaussian_mean(y, sigma):
    sigma = sigma.reshape(-1, *[1] * (y.ndim - 1))
    return ((S**2 * y + sigma**2 * M) / (S**2 + sigma**2)).to(y.dtype)


def trajectory(process, c, t):
    """z(t) on the PF-ODE's trajectory that keeps (z/s − M) / sqrt(S² + σ²) = c."""
    return process.scale(t) * (M + c * (S**2 + process.sigma(t) ** 2).sqrt())


def gaussian_sample(noise, sigma_min=0.002, sigma_max=80.0):
    """The exact flow from σ_max to σ_min, and the posterior mean there."""
    y = M + (sigma_max * noise - M) * math.sqrt((S**2 + sigma_min**2) / (S**2 + sigma_max**2))
    return gaussian_mean(y, torch.full((len(y),), sigma_min, dtype=torch.float64))


def latents(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def slope(counts, errors):
    return np.polyfit(np.log(1 / np.array(counts)), np.log(errors), 1)[0]
