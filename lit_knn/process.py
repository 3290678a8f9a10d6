"""The noise process of EDM: σ(t) = t and s(t) = 1."""

import torch
from torch import Tensor


def per_item(t: Tensor | float, like: Tensor) -> Tensor:
    """Reshape `t`, () or (B,), so that it broadcasts over `like`, (B, *shape).

    Returns:
        A float tensor on the device of `like`, (B, 1, ..., 1) or ().
    """
    if not isinstance(t, Tensor):
        t = torch.tensor(t, dtype=torch.float64)
    t = t.to(like.device)
    return t if t.ndim == 0 else t.reshape(-1, *[1] * (like.ndim - 1))


def forward_noise(x: Tensor, t: Tensor | float, noise: Tensor) -> Tensor:
    """Draw z = x + σ(t)·ε from the forward likelihood p_t(z|x) = N(z; x, t²I) (below Eq. 2, eq:posterior).

    Args:
        x: (B, *shape), clean data.
        t: (B,) or scalar, noise level.
        noise: (B, *shape), standard normal ε.

    Returns:
        (B, *shape), in the dtype of `x`.
    """
    return x + per_item(t, x).to(x.dtype) * noise


def pf_ode_velocity(z: Tensor, t: Tensor | float, mu: Tensor) -> Tensor:
    """dz/dt of the probability flow ODE, Eq. 3 (eq:pfode) with the score of Eq. 5: (z − E[x|z,t]) / t.

    Args:
        z: (B, *shape), noisy latents.
        t: (B,) or scalar, t > 0.
        mu: (B, *shape), posterior mean E[x|z,t] or an estimate of it.

    Returns:
        (B, *shape).
    """
    return (z - mu) / per_item(t, z)
