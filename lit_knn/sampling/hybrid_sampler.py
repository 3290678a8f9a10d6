"""The hybrid sampler of Figure 5: one posterior mean at high noise levels, and another at low ones."""

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.sampling.noise_grid import EDM_GRID, NoiseGrid
from lit_knn.sampling.samplers import integrate_flow
from lit_knn.sampling.solvers import PosteriorMean


@torch.no_grad()
def hybrid_sampler(
    estimator_mean: PosteriorMean,
    network_mean: PosteriorMean,
    latents: Tensor,
    t_switch: float,
    num_steps: int = 18,
    grid: NoiseGrid = EDM_GRID,
) -> Tensor:
    """Draw images by EDM's sampler with one posterior mean above t_switch and another below it (Figure 5).

    The process is EDM's, in which t is σ.

    Args:
        estimator_mean: (z (B, *shape), t (B,) float64) -> E[x|z,t], for t >= t_switch. It gets the dtype of `latents`.
        network_mean: the same for t <= t_switch.
        latents: (B, *shape), standard normal, for instance `seeded_noise(seeds, shape)`. The result has their dtype.
        t_switch: noise level between both ends of the grid, where both means are evaluated.
        num_steps: number of noise levels without t_switch, at least 1.
        grid: the grid of noise levels.
    """
    above, below = hybrid_sigmas(t_switch, num_steps, grid)
    z = above[0].item() * latents.double()

    z = integrate_flow(estimator_mean, z, above, latents.dtype)
    z = integrate_flow(network_mean, z, below, latents.dtype)
    return z.to(latents.dtype)


def hybrid_sigmas(
    t_switch: float, num_steps: int = 18, grid: NoiseGrid = EDM_GRID
) -> tuple[Tensor, Tensor]:
    """Cut EDM's grid in two at t_switch: sigma_max … t_switch, and t_switch … sigma_min, 0; descending, float64.

    The levels below t_switch stay the same as in the whole grid. So the lower part costs no more than in EDM's sampler,
    and it is the same for all runs that start at t_switch. The arguments are those of `hybrid_sampler`.
    """
    sigmas = grid.descending(num_steps)
    if not grid.sigma_min < t_switch < grid.sigma_max:
        ends = f"sigma_min={grid.sigma_min} and sigma_max={grid.sigma_max}"
        raise InputError(f"t_switch={t_switch} must be between {ends}, both excluded")
    switch = torch.tensor([t_switch], dtype=torch.float64)
    above = torch.cat([sigmas[sigmas > switch], switch])
    below = torch.cat([switch, sigmas[sigmas < switch], torch.zeros_like(switch)])
    return above, below
