"""Samplers of flows: equal steps of Euler or Heun, and the adaptive steps of torchdiffeq."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lit_knn.errors import InputError, first_line
from lit_knn.schedules import check_num_steps
from lit_knn.solvers import PosteriorMean, heun_step
from lit_knn.theory.noise import LINEAR_PROCESS, Process, per_item

# A solver that needs more steps is stuck: the tolerance is below the rounding of the network.
MOST_STEPS = 1000
Seeds = Sequence[int] | Tensor
Velocity = Callable[[Tensor, Tensor], Tensor]
Start = Callable[[Seeds], tuple[Tensor, Velocity]]
"""seeds (B,) -> standard normal noise (B, *shape) and the velocity (z (B, *shape), tau (B,) float64) -> (B, *shape)."""


class TimeSpan:
    """Times τ of a flow from low to high; on the straight path the noise level at τ is τ/(1 − τ).

    Args:
        low: smallest time that a sampler evaluates.
        high: time at which a sampler starts.

    Raises:
        InputError: not 0 < low < high < 1.
    """

    def __init__(self, low: float, high: float) -> None:
        if not 0 < low < high < 1:
            raise InputError(f"{type(self).__name__}: need 0 < low < high < 1, got low={low} and high={high}")
        self.low = low
        self.high = high

    def descending(self, num_steps: int) -> Tensor:
        """Times of a sampler: `num_steps` equal steps from `high` to 0, without 0 and the times below `low`; float64.

        Raises:
            InputError: as `check_num_steps`.
        """
        check_num_steps(num_steps)
        times = torch.linspace(self.high, 0, num_steps + 1, dtype=torch.float64)[:-1]
        return times[times >= self.low]


class FlowSampler(ABC):
    """Integrates dz/dτ = v(z, τ) from noise at τ = high to data at τ = 0, in float64.

    It starts with the noise of z at `high`, which leaves out s(high)·x: on the straight path z = high·ε without
    (1 − high)·x. It ends with the posterior mean of the last time, as EDM's sampler does. An image depends on its own
    seed alone.
    """

    chooses_steps = False
    """Whether the sampler finds its own number of steps. Then `num_steps` must be None."""

    solver: Callable | None = None
    """One step of the sampler, if it is a step of `lit_knn.solvers`."""

    @abstractmethod
    def __call__(
        self, start: Start, seeds: Seeds, times: TimeSpan, num_steps: int | None, process: Process = LINEAR_PROCESS
    ) -> Tensor:
        """Draw one image per seed, (B, *shape) float32.

        Args:
            start: makes noise and velocity of given seeds.
            seeds: (B,), non-negative integers.
            times: the range of times.
            num_steps: number of steps; None if the sampler chooses its own.
            process: the noise process of the flow.
        """


class FixedSteps(FlowSampler):
    """Equal steps in τ. Heun's steps need 2·num_steps − 1 evaluations and have order 2, Euler's num_steps and order 1.

    Args:
        solver: `lit_knn.solvers.heun_step` or `lit_knn.solvers.euler_step`.
    """

    def __init__(self, solver: Callable = heun_step) -> None:
        self.solver = solver

    def __call__(
        self, start: Start, seeds: Seeds, times: TimeSpan, num_steps: int | None, process: Process = LINEAR_PROCESS
    ) -> Tensor:
        """See `FlowSampler.__call__`."""
        assert num_steps is not None
        assert self.solver is not None
        noise, velocity = start(seeds)
        mean, levels = _posterior_mean(velocity, noise.dtype, process), times.descending(num_steps)
        z = process.noise_std(levels[0]).item() * noise.double()
        for tau, tau_next in pairwise(levels):
            z = self.solver(z, tau, tau_next, mean, process)
        return mean(z, levels[-1].to(z.device).expand(len(z))).to(noise.dtype)


class AdaptiveSteps(FlowSampler):
    """Dormand-Prince steps of order 5 of torchdiffeq, whose lengths come from the error on a few pilot images.

    torchdiffeq takes the same steps for all images of a batch. So an image would depend on the others of its batch.
    Here the steps are found on images of fixed seeds, 0 to pilot − 1, and every image takes these steps. The error of
    the pilot images is controlled, and that of the others is like theirs. Each call evaluates the pilot images, too.

    Args:
        rtol: relative tolerance of a step; torchcfm and Lipman et al. 2022 sample with 1e-5.
        atol: absolute tolerance of a step.
        pilot: number of pilot images, at least 1.

    Raises:
        InputError: an option is not above 0; at sampling, the velocity is not finite or needs over 1,000 steps.
    """

    chooses_steps = True

    def __init__(self, rtol: float = 1e-5, atol: float = 1e-5, pilot: int = 16) -> None:
        for name, value in {"rtol": rtol, "atol": atol, "pilot": pilot}.items():
            if not value > 0:
                raise InputError(f"AdaptiveSteps: {name} must be above 0, got {value}")
        self.rtol = rtol
        self.atol = atol
        self.pilot = pilot

    def __call__(
        self, start: Start, seeds: Seeds, times: TimeSpan, num_steps: int | None, process: Process = LINEAR_PROCESS
    ) -> Tensor:
        """See `FlowSampler.__call__`."""
        assert num_steps is None
        noise, velocity = start(range(self.pilot))
        flow, end = _BackwardFlow(velocity, times.high, noise.dtype), times.high - times.low
        std = process.noise_std(torch.tensor(times.high, dtype=torch.float64)).item()
        self._integrate(flow, std * noise.double(), torch.tensor([end], dtype=torch.float64), {})
        noise, velocity = start(seeds)
        ends = torch.stack(flow.ends).cpu()
        z = self._replay(_BackwardFlow(velocity, times.high, noise.dtype), std * noise.double(), ends)
        mean = _posterior_mean(velocity, noise.dtype, process)
        return mean(z, torch.full((len(z),), times.low, dtype=torch.float64, device=z.device)).to(noise.dtype)

    def _replay(self, flow: "_BackwardFlow", z: Tensor, ends: Tensor) -> Tensor:
        """Take the given steps: with a huge tolerance the solver accepts each step, and would double any that follows.

        So every step is cut at the next of `ends`. A step that ended there uncut would not count as one of them.
        """
        lengths = ends.diff(prepend=ends.new_zeros(1))
        growth = (lengths[1:] / lengths[:-1]).max().item() if len(ends) > 1 else 1.0
        options = {"first_step": 2 * lengths[0].item(), "ifactor": 2 * max(growth, 1.0)}
        return AdaptiveSteps(1e30, 1e30)._integrate(flow, z, ends, options)

    def _integrate(self, flow: "_BackwardFlow", z: Tensor, ends: Tensor, options: dict[str, Any]) -> Tensor:
        """Integrate from 0 to the last of `ends`; steps end at all of them."""
        from torchdiffeq import odeint

        ends = ends.to(z.device)
        options = {"step_t": ends, "max_num_steps": MOST_STEPS, **options}
        span = torch.stack([torch.zeros_like(ends[-1]), ends[-1]])
        try:
            return odeint(flow, z, span, rtol=self.rtol, atol=self.atol, method="dopri5", options=options)[-1]
        except AssertionError as error:  # torchdiffeq's way to refuse
            raise InputError(f"AdaptiveSteps: the flow cannot be integrated: {first_line(error)[:100]}") from error


class _BackwardFlow:
    """dz/ds = −v(z, high − s), the flow towards the data; notes where the solver's accepted steps end."""

    def __init__(self, velocity: Velocity, high: float, dtype: torch.dtype) -> None:
        self.velocity, self.high, self.dtype = velocity, high, dtype
        self.ends: list[Tensor] = []

    def __call__(self, s: Tensor, z: Tensor) -> Tensor:
        return -self.velocity(z.to(self.dtype), (self.high - s).double().expand(len(z))).double()

    def callback_accept_step(self, s: Tensor, z: Tensor, step: Tensor) -> None:
        """Note the end of a step; torchdiffeq calls this."""
        self.ends.append(s + step)


def _posterior_mean(velocity: Velocity, dtype: torch.dtype, process: Process) -> PosteriorMean:
    """E[x|z] of a velocity, which is called with the type of the noise."""
    return lambda z, tau: process.mean_of_velocity(z, per_item(tau, z), velocity(z.to(dtype), tau).double())
