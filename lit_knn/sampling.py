"""The consistency sampler, and latents that depend on their seed alone."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lit_knn.rng import keyed_generator


def seeded_noise(
    seeds: Sequence[int] | Tensor, shape: Sequence[int], draw: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal noise in which item i depends on (seeds[i], draw) alone, not on the batch or the device.

    Args:
        seeds: (B,), non-negative integers.
        shape: shape of one item.
        draw: number of the draw, for samplers that need noise more than once.
        device: where the result goes; the numbers are drawn on the CPU.

    Returns:
        (B, *shape), float32.
    """
    seeds = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    noise = [torch.randn(*shape, generator=keyed_generator("cpu", int(seed), draw)) for seed in seeds]
    return torch.stack(noise).to(device)


def consistency_sampler(
    consistency_function: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    sigmas: Sequence[float] = (80.0,),
    sigma_min: float = 0.002,
) -> Tensor:
    """Multi-step consistency sampling (Song et al. 2023, Algorithm 1).

    Each step after the first re-noises the sample with sqrt(σ² − σ_min²), because the consistency function
    returns data at noise level σ_min.

    Args:
        consistency_function: (z (B, *shape), t (B,)) -> (B, *shape).
        noise: (len(sigmas), B, *shape), standard normal, one draw a step.
        sigmas: noise levels, descending; the first is the prior's.
        sigma_min: noise level at which the consistency function is the identity.

    Returns:
        (B, *shape), model space.

    Raises:
        ValueError: sigmas empty, not descending, or not above sigma_min; another number of noise draws.
    """
    levels = [*sigmas, sigma_min]
    if len(levels) < 2 or any(high <= low for high, low in pairwise(levels)):
        raise ValueError(f"sigmas must descend and stay above sigma_min={sigma_min}, got {list(sigmas)}")
    if len(noise) != len(sigmas):
        raise ValueError(f"need one noise draw for each of the {len(sigmas)} sigmas, got {len(noise)}")
    x = torch.zeros_like(noise[0])
    for step, sigma in enumerate(sigmas):
        spread = sigma if step == 0 else (sigma**2 - sigma_min**2) ** 0.5
        z = x + spread * noise[step]
        x = consistency_function(z, torch.full((len(z),), sigma, dtype=torch.float64, device=z.device))
    return x
