"""The velocity of flow matching for a finite set of images, in float64."""

import torch


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
