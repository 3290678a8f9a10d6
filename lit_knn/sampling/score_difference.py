"""The difference of two smoothed scores, which moves samples of one distribution towards another."""

import math

import torch
from torch import Generator, Tensor

from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.solvers import PosteriorMean
from lit_knn.theory.noise import forward_noise


def score_difference(
    x: Tensor, t: Tensor, noise: Tensor, attraction: PosteriorMean, repulsion: PosteriorMean
) -> Tensor:
    """Return V = E_data[x|z, t] − E_samples[x|z, t] at z = x + t·noise, (B, *shape).

    By Eq. 5 (eq:clean_score), V/t² is the score of the smoothed data minus that of the smoothed samples. Its mean over
    the noise is minus the gradient, for one sample x, of the Kullback-Leibler divergence between the smoothed
    distributions (Weber 2023, arXiv 2304.12906).

    Args:
        x: (B, *shape), the samples.
        t: (B,) float64, noise levels.
        noise: (B, *shape), standard normal.
        attraction: the posterior mean over the data.
        repulsion: the posterior mean over samples, among which x may be or not.
    """
    z = forward_noise(x, t, noise)
    return attraction(z, t) - repulsion(z, t)


def stratified_levels(samples: int, levels: int, ends: NoiseGrid, generator: Generator) -> Tensor:
    """Draw `levels` noise levels for each sample, uniform in ln t, (levels, samples) float64.

    Each of levels · samples equal parts of the range has one level, and each sample has one level in each of `levels`
    equal parts. So the mean over a batch varies less than with independent levels, and is the same in expectation.

    Args:
        samples: number of samples.
        levels: levels of each sample.
        ends: the lowest and the highest level.
        generator: source of randomness; the result is on its device.
    """
    shape = levels, samples
    device = generator.device
    order = torch.rand(shape, generator=generator, device=device).argsort(1)
    within = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    part = torch.arange(levels, device=device)[:, None]

    uniform = (part + (order + within) / samples) / levels
    low, high = map(math.log, ends.noise_range())
    return (low + (high - low) * uniform).exp().clamp(ends.sigma_min, ends.sigma_max)
