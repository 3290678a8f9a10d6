"""EDM's sampler, the consistency sampler, and noise that depends only on its seed."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator, seed_from_key
from lit_knn.sampling.noise_grid import EDM_GRID, NoiseGrid
from lit_knn.sampling.solvers import PosteriorMean, heun_step
from lit_knn.theory.noise import EDM_PROCESS, Process, under_process


def seeded_noise(
    seeds: Sequence[int] | Tensor,
    shape: Sequence[int],
    draw: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw standard normal noise, (B, *shape) float32. Item i depends only on (seeds[i], draw).

    Args:
        seeds: (B,), non-negative integers.
        shape: shape of one item.
        draw: number of the draw, for samplers that need noise more than once.
        device: where the result goes. The numbers are always drawn on the CPU, so they do not depend on it.
    """
    noise = []
    for seed in _integers(seeds):
        generator = keyed_generator("cpu", seed, draw)
        item = torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
        noise.append(item)
    return torch.stack(noise).to(device)


def seeded_classes(
    seeds: Sequence[int] | Tensor, num_classes: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw a class for each seed, (B,) int64. Item i depends only on seeds[i].

    Args:
        seeds: (B,), non-negative integers.
        num_classes: number of classes.
        device: where the result goes.
    """
    # The key has three parts, so it differs from the keys (seed, draw) of seeded_noise.
    draws = [seed_from_key(seed, Stream.CLASS, 0) % num_classes for seed in _integers(seeds)]
    return torch.tensor(draws, device=device)


def _integers(seeds: Sequence[int] | Tensor) -> list[int]:
    """Return seeds as a list of Python's integers; raise InputError for anything else, and for no seed."""
    values = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    if not isinstance(values, Iterable):
        raise InputError(f"seeds must be a sequence such as range(4), got {values!r:.80}")

    integers = []
    for value in values:
        # Python would round 1.9 down, which is another seed.
        if not isinstance(value, Integral) or int(value) < 0:
            raise InputError(f"seeds must be non-negative integers, got {seeds!r:.80}")
        integers.append(int(value))
    if not integers:
        raise InputError("seeds must hold at least one seed")
    return integers


@torch.no_grad()
def consistency_sampler(
    consistency_function: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    sigmas: Sequence[float] = (80.0,),
    sigma_min: float = 0.002,
) -> Tensor:
    """Draw images by multi-step consistency sampling (Song et al. 2023, Algorithm 1): (B, *shape), model space.

    Each step after the first adds noise of size sqrt(σ² − σ_min²), because the consistency function returns data at
    noise level σ_min.

    Args:
        consistency_function: (z (B, *shape), t (B,)) -> (B, *shape).
        noise: (len(sigmas), B, *shape), standard normal, one draw per step.
        sigmas: noise levels, descending, above sigma_min; the first is the prior's.
        sigma_min: noise level at which the consistency function is the identity.
    """
    sigmas = [float(sigma) for sigma in sigmas]
    check_sampling_sigmas(sigmas, sigma_min)
    if noise.ndim < 3 or len(noise) != len(sigmas):
        rule = f"({len(sigmas)}, B, *shape), a draw each step"
        raise InputError(f"noise must be {rule}, got {tuple(noise.shape)}")

    x = torch.zeros_like(noise[0])
    for step, sigma in enumerate(sigmas):
        spread = sigma if step == 0 else (sigma**2 - sigma_min**2) ** 0.5
        z = x + spread * noise[step]
        t = torch.full((len(z),), sigma, dtype=torch.float64, device=z.device)
        x = consistency_function(z, t)
    return x


def check_sampling_sigmas(sigmas: Sequence[float], sigma_min: float) -> None:
    """Raise InputError unless the levels of a consistency sampler descend and are valid.

    Valid levels are finite and above `sigma_min`.
    """
    # With these ends, one comparison of neighbours also finds infinite and too small levels.
    levels = [math.inf, *sigmas, sigma_min]
    if not sigmas or not all(high > low for high, low in pairwise(levels)):
        rule = f"must descend and stay above sigma_min={sigma_min}"
        raise InputError(f"sampling_sigmas={list(sigmas)!r:.80} {rule}")


@torch.no_grad()
def heun_sampler(
    denoiser: PosteriorMean,
    latents: Tensor,
    num_steps: int = 18,
    grid: NoiseGrid = EDM_GRID,
    process: Process = EDM_PROCESS,
) -> Tensor:
    """Draw images by EDM's deterministic sampler (Karras et al. 2022, Algorithm 1) in 2·num_steps − 1 evaluations.

    It takes Heun steps in float64 through the noise levels of their Eq. 5, which `process` turns into times. The last
    step, to t = 0, gives the posterior mean at σ_min. In the EDM and flow-matching processes this equals Algorithm 1's
    Euler step. In the VP process, where σ ∝ √t near 0, an Euler step in t would leave noise.

    Args:
        denoiser: (y (B, *shape), sigma (B,) float64) -> E[x | x + σε = y], for any process: `estimator.posterior_mean`
            or a network. It gets the dtype of `latents`. If it draws random numbers, an image depends on its batch.
        latents: (B, *shape), standard normal, for instance `seeded_noise(seeds, shape)`. The result has their dtype.
        num_steps: number of noise levels, at least 1.
        grid: the grid of noise levels.
        process: the noise process whose PF-ODE is integrated; every process ends in model space at t = 0.
    """
    times = process.t_of_sigma(grid.descending(num_steps))
    z = process.noise_std(times[0]).item() * latents.double()

    times = torch.cat([times, times.new_zeros(1)])
    image = integrate_flow(denoiser, z, times, dtype=latents.dtype, process=process)
    return image.to(latents.dtype)


@torch.no_grad()
def integrate_flow(
    posterior_mean: PosteriorMean,
    z: Tensor,
    times: Tensor,
    dtype: torch.dtype = torch.float32,
    process: Process = EDM_PROCESS,
) -> Tensor:
    """Integrate the PF-ODE, Eq. 3 (eq:pfode, eq:general_pfode), by Heun steps through `times`: (B, *shape), float64.

    Args:
        posterior_mean: (y (B, *shape), sigma (B,) float64) -> E[x | x + σε = y], for any process.
        z: (B, *shape), at times[0].
        times: (L,), descending, on the CPU. Only the last may be 0; the step to 0 gives the posterior mean.
        dtype: type of y in calls of `posterior_mean`.
        process: the noise process.
    """

    def mean_in_double(y: Tensor, sigma: Tensor) -> Tensor:
        return posterior_mean(y.to(dtype), sigma).double()

    mean = under_process(mean_in_double, process)
    z = z.double()
    for t, t_next in pairwise(times):
        if t_next > 0:
            z = heun_step(z, t, t_next, mean, process=process)
        else:
            # The step to 0 gives the posterior mean.
            z = mean(z, t.expand(len(z)))
    return z
