"""One point of Figure 5: how its samples are drawn and measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_knn.estimators import Estimator
from lit_knn.metrics.fidelity_measure import FidelityMeasure
from lit_knn.metrics.memorisation import MemorisationMetric, nearest_images
from lit_knn.metrics.progress import Bar, progress_bar
from lit_knn.metrics.samples import draw_samples
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


@dataclass(frozen=True)
class HybridMeasure:
    """Measures samples of the hybrid sampler: their distance to the data, and how many are copies.

    Args:
        samples: draws them.
        distance: compares them with the data, after its `prepare`.
        num_samples: of each point, with the seeds 0 to num_samples − 1.
        batch_size: samples drawn at a time; what an estimator draws depends on it.
        threshold: largest ratio of nearest to second nearest distance at which a sample is a copy.
    """

    samples: HybridSamples
    distance: FidelityMeasure
    num_samples: int
    batch_size: int
    threshold: float = 1 / 3

    def __call__(
        self,
        estimator: Estimator | None,
        t_switch: float,
        watch: Callable[[Tensor, Tensor], Any] = lambda seeds, samples: None,
        bar: Bar = progress_bar,
    ) -> dict[str, float]:
        """Measure one point; all ranks must ask, which split its batches.

        Args:
            estimator: see `HybridSamples.draw`.
            t_switch: where the network takes over.
            watch: sees the seeds and samples of each batch of this rank.
            bar: makes the progress bar of the pass over the data.

        Returns:
            The distance by its name, `copied_fraction` and `mean_nearest_distance`.
        """
        reference = self.samples.reference
        memorisation = MemorisationMetric(self.threshold).to(reference.device)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            draw = partial(self.samples.draw, estimator, t_switch)
            for seeds, samples in draw_samples(draw, self.num_samples, self.batch_size):
                memorisation.update(nearest_images(samples, reference))
                watch(seeds, samples)
                yield seeds, samples

        distances = self.distance(reference, batches(), None, reference.device, bar)
        metric = self.distance.extractor.metric
        return {metric: distances[metric], **memorisation.compute()}
