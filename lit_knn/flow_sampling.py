"""Samplers of flows: equal steps of Euler or Heun, and the adaptive steps of torchdiffeq."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.solvers import heun_step
from lit_knn.theory.noise import LINEAR_PROCESS

Seeds = Sequence[int] | Tensor
Velocity = Callable[[Tensor, Tensor], Tensor]
Start = Callable[[Seeds], tuple[Tensor, Velocity]]
"""seeds (B,) -> standard normal noise (B, *shape) and the velocity (z (B, *shape), tau (B,) float64) -> (B, *shape)."""


class TimeRange(Protocol):
    """The times of a sampler; see `lit_knn.training.time_distributions.TimeDistribution`."""

    @property
    def low(self) -> float:
        """Smallest time that a sampler evaluates."""

    @property
    def high(self) -> float:
        """Time at which a sampler starts."""

    def descending(self, num_steps: int) -> Tensor:
        """Times from `high` to `low`, without 0."""


class FlowSampler(ABC):
    """Integrates dz/dτ = v(z, τ) from noise at τ = high to data at τ = 0, in float64.

    It starts with z = high·ε, which leaves out (1 − high)·x, and ends with the posterior mean z − τv of the last time,
    as EDM's sampler does. An image depends on its own seed alone.
    """

    chooses_steps = False
    """Whether the sampler finds its own number of steps. Then `num_steps` must be None."""

    @abstractmethod
    def __call__(self, start: Start, seeds: Seeds, times: TimeRange, num_steps: int | None) -> Tensor:
        """Draw one image per seed, (B, *shape) float32.

        Args:
            start: makes noise and velocity of given seeds.
            seeds: (B,), non-negative integers.
            times: the range of times.
            num_steps: number of steps; None if the sampler chooses its own.
        """


class FixedSteps(FlowSampler):
    """Equal steps in τ. Heun's steps need 2·num_steps − 1 evaluations and have order 2, Euler's num_steps and order 1.

    Args:
        solver: `lit_knn.solvers.heun_step` or `lit_knn.solvers.euler_step`.
    """

    def __init__(self, solver: Callable = heun_step) -> None:
        self.solver = solver

    def __call__(self, start: Start, seeds: Seeds, times: TimeRange, num_steps: int | None) -> Tensor:
        """See `FlowSampler.__call__`."""
        if num_steps is None:
            raise InputError("FixedSteps: the number of steps is null")
        noise, velocity = start(seeds)

        def mean(z: Tensor, tau: Tensor) -> Tensor:
            return z - tau.to(z.device).reshape(-1, *[1] * (z.ndim - 1)) * velocity(z.to(noise.dtype), tau).double()

        levels = times.descending(num_steps)
        z = levels[0].item() * noise.double()
        for tau, tau_next in pairwise([*levels, torch.zeros_like(levels[0])]):
            z = self.solver(z, tau, tau_next, mean, LINEAR_PROCESS)
        return z.to(noise.dtype)
