"""The sampler of flows takes Euler or Heun steps of equal size in τ, or in √τ under VP."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, check_at_least
from lit_knn.sampling.solvers import heun_step
from lit_knn.theory.noise import LINEAR_PROCESS, Process, per_item

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(z (B, *shape), tau (B,) float64) -> dz/dtau (B, *shape)."""


class TimeSpan:
    """Times τ of a flow from low to high; on the straight path the noise level at τ is τ/(1 − τ).

    Args:
        low: smallest time that a sampler evaluates, above 0.
        high: time at which a sampler starts, below 1.
    """

    def __init__(self, low: float, high: float) -> None:
        if not 0 < low < high < 1:
            rule = f"{type(self).__name__}: need 0 < low < high < 1"
            raise InputError(f"{rule}, got low={low} and high={high}")
        self.low = low
        self.high = high

    def descending(self, num_steps: int, growth: float = 1.0) -> Tensor:
        """Return the times of a sampler, descending, float64.

        They are `num_steps` equal steps in τ^growth from `high` to 0, without 0 and without the times below `low`.

        On the straight path `growth` is 1. Under VP σ grows as √τ: equal steps in τ would end at a level so high that
        the last mean blurs details.
        """
        check_at_least(1, num_steps=num_steps)
        steps = torch.linspace(self.high**growth, 0, num_steps + 1, dtype=torch.float64)[:-1]
        times = steps ** (1 / growth)
        return times[times >= self.low]


class FixedSteps:
    """Integrates a flow by equal steps in τ, or in √τ under VP (`Process.growth`).

    Heun has order 2 and needs 2·num_steps − 1 evaluations; Euler has order 1 and needs num_steps.

    The sampler integrates dz/dτ = v(z, τ) in float64 from noise at τ = high to data at τ = 0. The start is only the
    noise part of z: on the straight path it is high·ε, without (1 − high)·x. The result is the posterior mean at the
    last time, as in EDM's sampler.

    Args:
        solver: `lit_knn.sampling.solvers.heun_step` or `lit_knn.sampling.solvers.euler_step`.
    """

    def __init__(self, solver: Callable = heun_step) -> None:
        self.solver = solver

    def __call__(
        self,
        velocity: Velocity,
        noise: Tensor,
        times: TimeSpan,
        num_steps: int,
        process: Process = LINEAR_PROCESS,
    ) -> Tensor:
        """Draw one image per item of `noise`, with its shape and dtype.

        Args:
            velocity: called with the dtype of `noise`.
            noise: (B, *shape), standard normal.
            times: the range of times.
            num_steps: number of steps.
            process: the noise process of the flow.
        """

        def mean(z: Tensor, tau: Tensor) -> Tensor:
            v = velocity(z.to(noise.dtype), tau).double()
            return process.mean_of_velocity(z, per_item(tau, z), v)

        levels = times.descending(num_steps, process.growth)
        z = process.noise_std(levels[0]).item() * noise.double()
        for tau, tau_next in pairwise(levels):
            # By position, because a user's own solver may name its arguments differently.
            z = self.solver(z, tau, tau_next, mean, process)
        return mean(z, levels[-1].to(z.device).expand(len(z))).to(noise.dtype)
