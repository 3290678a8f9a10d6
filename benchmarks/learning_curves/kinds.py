"""Describes a training module to the learning curves: how to make it, its loss at fixed latents, its exact target."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import Estimator, Exact
from lit_knn.modules.base import EstimatorTraining
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import EDM_PROCESS, Process, forward_noise

# These streams are the last parts of keys; those of training and of the measurements in lit_knn are below 20.
LATENTS, SOURCES, REPEATS, INITIAL_WEIGHTS = 30, 31, 32, 33


class Latents(NamedTuple):
    """Fixed latents z of images x at times t. `lower` is the teacher's level of a consistency module, else t."""

    x: Tensor
    z: Tensor
    t: Tensor
    lower: Tensor


class Kind(ABC):
    """A training module of the grid."""

    process: Process = EDM_PROCESS
    """The process of the latents."""
    exact: type[Exact] = Exact
    """The estimator behind `exact_output`."""
    tunes = False
    """Tells whether a run starts from the end of the EDM run of the same seed with one-sample targets."""

    @abstractmethod
    def options(self, steps: int) -> dict[str, Any]:
        """Return the module's options for a run of `steps` steps, in JSON types."""

    @abstractmethod
    def make(
        self, net: nn.Module, estimator: Estimator, seed: int, steps: int, start: Path | None
    ) -> EstimatorTraining:
        """Make the module for a run of `steps` steps, from the checkpoint `start` if the kind tunes."""

    @abstractmethod
    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw times t and lower levels, (size,) float64 each, from the module's distribution in training."""

    @abstractmethod
    def losses(self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator) -> Tensor:
        """Compute the training loss of each latent, (B,), with a target drawn afresh."""

    @abstractmethod
    def exact_output(self, latents: Latents, exact: Exact) -> Tensor:
        """Compute the target that has no error, (B, *shape)."""

    @abstractmethod
    def errors(self, module: Any, latents: Latents, wanted: Tensor) -> Tensor:
        """Compare the network with exact targets: (B,), means over dimensions."""

    def latents(self, reference: ReferenceSet, size: int, part: int) -> Latents:
        """Draw latents of images of the set; they are the same for all estimators and seeds."""
        generator = keyed_generator("cpu", size, part, LATENTS)
        x = reference.gather(torch.randint(reference.N, (size,), generator=generator))
        t, lower = self.levels(size, generator)
        return Latents(x, forward_noise(x, t, torch.randn(x.shape, generator=generator), self.process), t, lower)
