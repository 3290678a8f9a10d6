"""Hybrid samples for one point of Figure 5."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.hybrid_sampler import hybrid_sampler, hybrid_sigmas
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.samplers import integrate_flow, seeded_noise
from lit_knn.sampling.solvers import PosteriorMean
from lit_knn.theory.noise import forward_noise


@dataclass(frozen=True)
class HybridSamples:
    """Draws samples that an estimator or the data begins, and another estimator or a network ends from t_switch."""

    network: Estimator
    reference: ReferenceSet
    num_steps: int  # number of levels of the sampler's grid, without t_switch
    grid: NoiseGrid
    # The first part of the key of every draw, but not of the latents, which depend only on the samples' seeds.
    seed: int

    @torch.no_grad()
    def draw(self, estimator: Estimator | None, t_switch: float, seeds: Tensor) -> Tensor:
        """Draw one batch, (B, *shape), float32, model space; the latents are the same for all methods and all t_switch.

        The draws of estimators depend on the first seed.

        Args:
            estimator: integrates from sigma_max to t_switch. With None, the forward process gives the start at
                t_switch: x + t_switch·ε, with x drawn from the data with replacement.
            t_switch: the noise level at which the network takes over.
            seeds: (B,), non-negative integers.
        """
        device, first = self.reference.device, int(seeds[0])
        noise = seeded_noise(seeds, self.reference.shape, device=device)
        network = self._mean(self.network, first, Stream.NETWORK)
        if estimator is not None:
            above = self._mean(estimator, first, Stream.HYBRID)
            return hybrid_sampler(above, network, noise, t_switch, self.num_steps, self.grid)
        _, below = hybrid_sigmas(t_switch, self.num_steps, self.grid)
        drawn = keyed_generator("cpu", self.seed, first, Stream.FORWARD)
        ids = torch.randint(self.reference.N, (len(seeds),), generator=drawn)
        z = forward_noise(self.reference.gather(ids.to(device)), t_switch, noise)
        return integrate_flow(network, z, below).float()  # computed in float64

    def _mean(self, estimator: Estimator, first: int, stream: Stream) -> PosteriorMean:
        """Return the estimator's mean as a function of z and t, which draws from the stream of this batch."""
        generator = keyed_generator(self.reference.device, self.seed, first, stream)
        return partial(estimator.posterior_mean, generator=generator)
