"""Velocities of flow matching in closed form, in float64: a Gaussian's, and that of a finite set."""

import math

import torch

from tests.gaussian_flow import M, S


def of_items(tau, z):
    return torch.as_tensor(tau, dtype=torch.float64).reshape(-1, *[1] * (z.ndim - 1))


def log_density_of_points(z, tau, points):
    """ln p(z) of z = (1 − τ)x + τε with x uniform over `points` (N, d); z is (d,)."""
    sq_dist = (z - (1 - tau) * points).square().sum(1)
    return torch.logsumexp(-sq_dist / (2 * tau**2), 0)


def velocity_by_autograd(log_density, z, tau):
    """E[ε − x | z] by autograd: E[ε|z] = −τ∇ln p(z), and E[x|z] = (z − τE[ε|z])/(1 − τ)."""
    score = torch.func.grad(log_density)(z, tau)
    noise = -tau * score
    return noise - (z - tau * noise) / (1 - tau)


def gaussian_velocity(z, tau):
    """The velocity for data N(M, S²): the derivative of the line that keeps (z − (1 − τ)M)/std(τ)."""
    t, z = of_items(tau, z), z.double()
    variance = (1 - t) ** 2 * S**2 + t**2
    return -M + (t - (1 - t) * S**2) / variance * (z - (1 - t) * M)


def gaussian_image(noise, times):
    """The exact flow from z = high·ε to `low`, and the posterior mean there."""
    low, high = times.low, times.high
    std = [math.sqrt((1 - t) ** 2 * S**2 + t**2) for t in (low, high)]
    z = (1 - low) * M + std[0] / std[1] * (high * noise.double() - (1 - high) * M)
    return z - low * gaussian_velocity(z, low)
