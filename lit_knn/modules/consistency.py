"""Consistency matching, the loss between two noise levels, which iCT and consistency tuning share."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.modules.conditioning import labels_on
from lit_knn.modules.consistency_module import ConsistencyModule
from lit_knn.modules.shared_dropout import SharedDropout
from lit_knn.sampling.distances import Metric
from lit_knn.sampling.schedules import consistency_weight
from lit_knn.sampling.solvers import PosteriorMean
from lit_knn.theory.noise import forward_noise

Solver = Callable[[Tensor, Tensor, Tensor, PosteriorMean], Tensor]
"""(z (B, *shape), t (B,), t_next (B,), posterior mean) -> z_next (B, *shape)."""


class ConsistencyTraining(ConsistencyModule):
    """Consistency matching, Eq. 7 (eq:CM), with the score of any estimator.

    The student is the network at (z, t). The teacher is the same network, with the same dropout mask and without
    gradient, at (ẑ, r), r < t. ẑ is one solver step from z down the probability flow ODE.

    Subclasses implement `draw_levels`, set `solver` and `metric`, and explain the arguments.
    """

    solver: Solver
    metric: Metric

    @abstractmethod
    def draw_levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the student's levels t and the teacher's r < t, (size,) float64 each, on the generator's device."""

    def losses(
        self, x: Tensor, class_label: Tensor | None, key: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute Eq. 7 (eq:CM), d(f(z, t), f⁻(ẑ, r)) / (t − r), for each item, (B,), and t, (B,) float64."""
        generator = keyed_generator(x.device, *key)
        t, r = self.draw_levels(len(x), generator)
        noise = torch.randn(x.shape, device=x.device, generator=generator)
        z = forward_noise(x, t, noise)
        z_hat = self.step_down(z, t, r, self.posterior_mean(x, class_label, generator))

        class_label = labels_on(x.device, class_label)
        dropout = SharedDropout(x.device, *key, Stream.DROPOUT)
        with dropout.masks():
            student = self.consistency_function(z, t, class_label)
        with dropout.masks(), torch.no_grad():
            teacher = self.consistency_function(z_hat, r, class_label)

        return consistency_weight(t, r).float() * self.distance(student, teacher), t

    def step_down(self, z: Tensor, t: Tensor, r: Tensor, posterior_mean: PosteriorMean) -> Tensor:
        """Return ẑ, (B, *shape): the solver's step from z (B, *shape) at level t to level r, (B,) each."""
        return self.solver(z, t, r, posterior_mean)

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the metric's distance of each item, (B,), between two batches (B, *shape)."""
        distance = self.metric(student, teacher)
        if distance.shape != student.shape[:1]:
            batch = tuple(student.shape[:1])
            raise InputError(
                f"metric must return the distance of each item, {batch}, got {distance.shape}"
            )
        return distance
