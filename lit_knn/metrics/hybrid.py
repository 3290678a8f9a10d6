"""One point of Figure 5: how its samples are drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet
from lit_knn.rng import keyed_generator
from lit_knn.sampling import hybrid_sampler, hybrid_sigmas, integrate_flow, seeded_noise
from lit_knn.schedules import NoiseGrid
from lit_knn.theory.noise import forward_noise

# Apart from the streams of the models.
ESTIMATOR_STREAM, FORWARD_STREAM = 10, 11


@dataclass(frozen=True)
class HybridSamples:
    """Samples that a network ends from t_switch, whatever brought them there.

    Attributes:
        network: integrates below t_switch.
        reference: the data.
        num_steps: levels of the sampler's grid, t_switch not counted.
        grid: of the noise levels.
        seed: first part of the key of every draw but the latents, which depend on the samples' seeds alone.
    """

    network: Estimator
    reference: ReferenceSet
    num_steps: int
    grid: NoiseGrid
    seed: int

    @torch.no_grad()
    def draw(self, estimator: Estimator | None, t_switch: float, seeds: Tensor) -> Tensor:
        """Draw one batch; all methods and all t_switch have the same latents.

        Args:
            estimator: integrates from sigma_max to t_switch; None starts at t_switch from the forward process,
                x + t_switch·ε, with x drawn from the data with replacement, as the exact flow does.
            t_switch: where the network takes over.
            seeds: (B,), of the latents; what an estimator draws is a function of the first.

        Returns:
            (B, *shape), float32, model space.
        """
        device, first = self.reference.device, int(seeds[0])
        noise = seeded_noise(seeds, self.reference.shape, device=device)
        if estimator is not None:
            generator = keyed_generator(device, self.seed, first, ESTIMATOR_STREAM)

            def mean(z: Tensor, t: Tensor) -> Tensor:
                return estimator.posterior_mean(z, t, generator=generator)

            return hybrid_sampler(mean, self.network.posterior_mean, noise, t_switch, self.num_steps, self.grid)
        _, below = hybrid_sigmas(t_switch, self.num_steps, self.grid)
        drawn = keyed_generator("cpu", self.seed, first, FORWARD_STREAM)
        ids = torch.randint(self.reference.N, (len(seeds),), generator=drawn)
        z = forward_noise(self.reference.gather(ids.to(device)), t_switch, noise)
        return integrate_flow(self.network.posterior_mean, z, below).float()
