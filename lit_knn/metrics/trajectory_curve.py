"""Errors of estimators at the latents of their own sampling: where a sampler needs them, not where training does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lit_knn.common.distributed import own_batches
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.tables import Row
from lit_knn.estimators import Estimator, Exact
from lit_knn.metrics.curve import Curve
from lit_knn.metrics.estimator_error import LatentMeans
from lit_knn.metrics.latents import bind_all
from lit_knn.metrics.measure import measure_estimator, quantities
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.noise_grid import EDM_GRID
from lit_knn.sampling.samplers import integrate_flow, seeded_noise

# Number of noise levels of EDM's sampler. The measured levels are added to them.
SAMPLING_LEVELS = 18


class Trajectory:
    """The latents of a batch on their way from noise to images, by EDM's deterministic sampler.

    Args:
        estimator: gives the posterior mean of the sampler.
        noise: (B, *shape), standard normal.
        levels: the noise levels to stop at; the sampler starts at EDM's largest level, or above it at the largest
            of them.
        generator: source of randomness of the estimator.
    """

    def __init__(
        self, estimator: Estimator, noise: Tensor, levels: Sequence[float], generator: Generator
    ) -> None:
        grid = EDM_GRID.descending(SAMPLING_LEVELS).tolist()
        self.times = sorted({*grid, *levels}, reverse=True)
        self.estimator, self.generator = estimator, generator
        self.z = self.times[0] * noise.double()

    def down_to(self, t: float) -> Tensor:
        """Go on to the noise level t, one of `levels`, and return the latents there: (B, *shape), float32."""
        passed = [level for level in self.times if level >= t]
        self.times = self.times[len(passed) - 1 :]
        self.z = integrate_flow(self._mean, self.z, torch.tensor(passed, dtype=torch.float64))
        return self.z.float()

    def _mean(self, z: Tensor, t: Tensor) -> Tensor:
        return self.estimator.posterior_mean(z, t, generator=self.generator)


@dataclass
class TrajectoryCurve(Curve):
    """A measurement of estimators over noise levels, each at latents of its own sampling.

    `lit_knn.callbacks.EstimatorError` explains the arguments. Estimators get no source, because a sampler has none. All
    start from the same noise, whatever the seed. Every other draw is a function of (seed, batch, estimator) or of
    (seed, batch, level, estimator, repeat), and each batch is measured by one rank. `estimates` does not count those of
    sampling.
    """

    def bind(self, reference: ReferenceSet) -> None:
        """Bind the estimators, and refuse those that cannot sample, because they need a source."""
        by_option = {f"estimators.{name}": self.estimators[name] for name in self.estimators}
        bind_all(by_option, reference, max(self.noise_levels), source=False)

    def levels(
        self,
        reference: ReferenceSet,
        seed: int = 0,
        advance: Callable[[int], object] = lambda estimates: None,
    ) -> Iterator[list[Row]]:
        """Measure level by level, from the highest down.

        All ranks must call it; they split the latents and get the same rows.

        Args:
            reference: the images that the estimators are bound to.
            seed: the first part of the keys of the estimators' draws.
            advance: called with the number of estimates after each batch.

        Yields:
            The rows of a noise level, one for each estimator, with the columns of `ErrorCurve.levels`.
        """
        self.bind(reference)
        exact = Exact().bind(reference)
        trajectories = self._trajectories(reference, seed)

        for level, t in enumerate(sorted(self.noise_levels, reverse=True)):
            rows: list[Row] = []
            for index, (name, estimator) in enumerate(self.estimators.items()):
                repeats = self.repeats_of(estimator)
                sums = LatentMeans(quantities(estimator, repeats)).to(reference.device)
                for batch, trajectory in trajectories[name].items():
                    z = trajectory.down_to(t)
                    mu = exact.posterior_mean(z.double(), t)
                    key = (seed, batch, level, index)
                    values = measure_estimator(
                        estimator, repeats, z, t, mu=mu, source=lambda repeat: None, key=key
                    )
                    sums.update(**values)
                    advance(len(z) * repeats)

                rows.append(self.row(name, t, sums))
            yield rows

    def _trajectories(self, reference: ReferenceSet, seed: int) -> dict[str, dict[int, Trajectory]]:
        """Return the trajectories of this rank's batches, by the name of the estimator and the number of the batch."""
        trajectories: dict[str, dict[int, Trajectory]] = {name: {} for name in self.estimators}
        for batch, numbers in own_batches(self.num_z, self.batch_size):
            noise = seeded_noise(numbers, reference.shape, device=reference.device)
            for index, (name, estimator) in enumerate(self.estimators.items()):
                generator = keyed_generator(reference.device, seed, batch, index, Stream.TRAJECTORY)
                trajectory = Trajectory(estimator, noise, self.noise_levels, generator)
                trajectories[name][batch] = trajectory
        return trajectories
