"""Euler and Heun steps of the probability flow ODE, Eq. 3 (eq:pfode, eq:general_pfode), driven by a posterior mean.

Both steps compute in float64. They call the posterior mean with the dtype of `z` and return this dtype. To integrate
in float64, pass float64 latents; with float32 latents, only the result of a step is rounded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_knn.theory.noise import EDM_PROCESS, Process, per_item

PosteriorMean = Callable[[Tensor, Tensor], Tensor]
"""(z (B, *shape), t (B,)) -> E[x|z,t] (B, *shape)."""


def euler_step(
    z: Tensor,
    t: Tensor | float,
    t_next: Tensor | float,
    posterior_mean: PosteriorMean,
    process: Process = EDM_PROCESS,
) -> Tensor:
    """Take one Euler step of Eq. 3 (eq:pfode) from t to t_next. It has order 1 and needs one evaluation.

    In the EDM process, with the one-sample mean x, the step gives exactly x + t_next·ε. Consistency matching then
    equals the original consistency training (appendix, eq:z_prime).

    Args:
        z: (B, *shape), latents at t.
        t: (B,) or scalar, t > 0.
        t_next: (B,) or scalar, t_next >= 0.
        posterior_mean: exact or estimated E[x|z,t] under `process`; for an estimator or denoiser, pass
            `under_process(estimator.posterior_mean, process)`.
        process: the noise process.

    Returns:
        (B, *shape), latents at t_next, in the dtype of `z`.
    """
    t, t_next = _times(z, t), _times(z, t_next)
    velocity = process.velocity(z.double(), per_item(t, z), posterior_mean(z, t).double())
    return (z.double() + per_item(t_next - t, z) * velocity).to(z.dtype)


def heun_step(
    z: Tensor,
    t: Tensor | float,
    t_next: Tensor | float,
    posterior_mean: PosteriorMean,
    process: Process = EDM_PROCESS,
) -> Tensor:
    """Take one Heun step of Eq. 3 (eq:pfode) from t to t_next. It has order 2 and needs two evaluations.

    The arguments are those of `euler_step`. If t_next = 0, the velocity there is not defined, so the
    step is Euler's. If t_next = 0 for all items, there is no second evaluation, unless t_next is on a
    GPU: looking at it would wait for the device.
    """
    on_gpu = isinstance(t_next, Tensor) and t_next.is_cuda
    all_end_at_0 = not on_gpu and not (torch.as_tensor(t_next) > 0).any()

    t, t_next = _times(z, t), _times(z, t_next)
    step = per_item(t_next - t, z)
    velocity = process.velocity(z.double(), per_item(t, z), posterior_mean(z, t).double())
    euler = z.double() + step * velocity
    if all_end_at_0:
        return euler.to(z.dtype)

    has_velocity_at_end = t_next > 0
    # Items that reach t = 0 are evaluated at their old t, and the result is discarded.
    t_eval = torch.where(has_velocity_at_end, t_next, t)
    mu_next = posterior_mean(euler.to(z.dtype), t_eval).double()
    velocity_next = process.velocity(euler, per_item(t_eval, z), mu_next)
    heun = z.double() + step * (velocity + velocity_next) / 2
    return torch.where(per_item(has_velocity_at_end, z), heun, euler).to(z.dtype)


def _times(z: Tensor, t: Tensor | float) -> Tensor:
    """Return one time for each item of z, (B,) float64."""
    return per_item(t, z).flatten().double().expand(z.shape[0])
