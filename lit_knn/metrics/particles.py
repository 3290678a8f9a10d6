"""Free particles: samples without a network, moved by the difference of two smoothed scores."""

from collections.abc import Iterator
from functools import partial
from itertools import count

import torch
from torch import Tensor

from lit_knn.common.errors import check_at_least, check_positive
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.tables import HELD_OUT
from lit_knn.estimators import Estimator
from lit_knn.metrics.feature_statistics import image_statistics
from lit_knn.metrics.features import Pixels
from lit_knn.metrics.fidelity import frechet_distance_of_statistics
from lit_knn.metrics.memorisation import memorisation
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.score_difference import score_difference, stratified_levels


class Particles:
    """Moves particles from noise to the data, each step by a share of V, see `score_difference`.

    Each step draws a noise level for each particle, uniform in ln t. Then V/t² is the gradient of the divergence
    between the smoothed particles and the smoothed data, so with exact means the steps descend on it.

    Args:
        repulsion: estimator over the particles; it is bound to them anew at each step.
        ends: the lowest and the highest noise level.
        num: number of particles.
        step_size: share of V that a step moves a particle by.
        seed: first part of the key of all draws, which are the same for all data and estimators.
    """

    def __init__(
        self, repulsion: Estimator, ends: NoiseGrid, num: int, step_size: float, seed: int
    ) -> None:
        check_at_least(2, num_particles=num)
        check_positive(step_size=step_size)
        self.repulsion = repulsion
        self.ends = ends
        self.num = num
        self.step_size = step_size
        self.seed = seed

    @torch.no_grad()
    def paths(self, attraction: Estimator) -> Iterator[Tensor]:
        """Yield the particles before the first step and after each step, (num, *shape) float32, without an end.

        Args:
            attraction: estimator that is bound to the data. Its device and shape are those of the particles.
        """
        reference = attraction.reference
        draws = keyed_generator(reference.device, self.seed, Stream.PARTICLES)
        shape = self.num, *reference.shape
        x = torch.randn(shape, device=reference.device, generator=draws)
        for step in count():
            yield x
            t = stratified_levels(self.num, 1, self.ends, draws).flatten()
            noise = torch.randn(shape, device=reference.device, generator=draws)
            # Estimators draw from another generator, so that the noise is the same for all of them.
            of_estimators = keyed_generator(reference.device, self.seed, step, Stream.PARTICLES)
            attract = partial(attraction.posterior_mean, generator=of_estimators)
            repulsion = self.repulsion.bind(ReferenceSet(x))
            repel = partial(repulsion.posterior_mean, x_source=x, generator=of_estimators)
            x = x + self.step_size * score_difference(x, t, noise, attract, repel)


class ParticleMeasure:
    """Measures how near particles are to training images, and to held-out ones if there are any.

    Args:
        training: the training images.
        held_out: images of the same kind that no estimator has, or None.
    """

    def __init__(self, training: ReferenceSet, held_out: ReferenceSet | None) -> None:
        self.training = training
        self.statistics = {Pixels.metric: image_statistics(training, Pixels())}
        if held_out is not None:
            self.statistics[Pixels.metric + HELD_OUT] = image_statistics(held_out, Pixels())

    def __call__(self, particles: Tensor) -> dict[str, float]:
        """Return Fréchet distances on pixels, the copied fraction and the mean distance to the nearest image.

        Args:
            particles: (num, *shape).
        """
        sampled = image_statistics(particles, Pixels())
        values = {}
        for name, real in self.statistics.items():
            values[name] = frechet_distance_of_statistics(sampled, real)
        return values | memorisation(particles, self.training)
