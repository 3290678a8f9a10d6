"""Euler and Heun steps of the probability flow ODE, Eq. 3 (eq:pfode, eq:general_pfode), driven by a posterior mean.

Both do their arithmetic in float64 and return the dtype of `z`: chain them on a float64 state to integrate in
float64, or pass float32 latents and only the result is rounded. The posterior mean sees the dtype of `z`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_knn.theory.noise import EDM_PROCESS, Process, per_item, pf_ode_velocity

PosteriorMean = Callable[[Tensor, Tensor], Tensor]
"""(z (B, *shape), t (B,)) -> E[x|z,t] (B, *shape)."""


def euler_step(
    z: Tensor,
    t: Tensor | float,
    t_next: Tensor | float,
    posterior_mean: PosteriorMean,
    process: Process = EDM_PROCESS,
) -> Tensor:
    """One Euler step of Eq. 3 (eq:pfode) from t to t_next: order 1, one evaluation.

    In the EDM process, with the one-sample mean x, it lands on x + t_next·ε exactly, which makes consistency
    matching the original consistency training (appendix, eq:z_prime).

    Args:
        z: (B, *shape), latents at t.
        t: (B,) or scalar, t > 0.
        t_next: (B,) or scalar, t_next >= 0.
        posterior_mean: E[x|z,t] under `process` or an estimate of it; of an estimator or a denoiser it is
            `under_process(estimator.posterior_mean, process)`.
        process: the noise process.

    Returns:
        (B, *shape), latents at t_next, in the dtype of `z`.
    """
    t, t_next = _times(z, t), _times(z, t_next)
    velocity = pf_ode_velocity(z.double(), t, posterior_mean(z, t).double(), process)
    return (z.double() + per_item(t_next - t, z) * velocity).to(z.dtype)


def heun_step(
    z: Tensor,
    t: Tensor | float,
    t_next: Tensor | float,
    posterior_mean: PosteriorMean,
    process: Process = EDM_PROCESS,
) -> Tensor:
    """One Heun step of Eq. 3 (eq:pfode) from t to t_next: order 2, two evaluations.

    Where t_next = 0 the velocity is not defined and the step is Euler's; if that is so for all items, there
    is no second evaluation.

    Args:
        z: (B, *shape), latents at t.
        t: (B,) or scalar, t > 0.
        t_next: (B,) or scalar, t_next >= 0.
        posterior_mean: E[x|z,t] under `process` or an estimate of it; of an estimator or a denoiser it is
            `under_process(estimator.posterior_mean, process)`.
        process: the noise process.

    Returns:
        (B, *shape), latents at t_next, in the dtype of `z`.
    """
    t, t_next = _times(z, t), _times(z, t_next)
    step = per_item(t_next - t, z)
    velocity = pf_ode_velocity(z.double(), t, posterior_mean(z, t).double(), process)
    euler = z.double() + step * velocity
    second = t_next > 0
    if not second.any():
        return euler.to(z.dtype)
    # Items that have arrived at t = 0 are evaluated at their old t and the result is thrown away.
    t_eval = torch.where(second, t_next, t)
    mu_next = posterior_mean(euler.to(z.dtype), t_eval).double()
    velocity_next = pf_ode_velocity(euler, t_eval, mu_next, process)
    heun = z.double() + step * (velocity + velocity_next) / 2
    return torch.where(per_item(second, z), heun, euler).to(z.dtype)


def _times(z: Tensor, t: Tensor | float) -> Tensor:
    return per_item(t, z).flatten().double().expand(z.shape[0])
