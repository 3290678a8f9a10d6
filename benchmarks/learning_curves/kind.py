"""Describes a training module of the learning curves: how it is made, its loss at fixed latents, its exact target."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.learning_curves.grid import PlugIns
from benchmarks.learning_curves.sets import Lengths
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.modules.base import EstimatorTraining
from lit_knn.nets.base import classes_of
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import EDM_PROCESS, Process, forward_noise

# These streams are the last parts of keys; those of training and of the measurements in lit_knn are below 20.
LATENTS, SOURCES, REPEATS, INITIAL_WEIGHTS, NEIGHBOURHOOD = 30, 31, 32, 33, 34
NOT_MEASURED: Mapping[str, Any] = MappingProxyType({"measure_target": False})


class Latents(NamedTuple):
    """Fixed latents z of images x at times t. `lower` is the teacher's level of a consistency module, else t.

    `label` (B,) is the class of each image in a set that is trained by class, else None.
    """

    x: Tensor
    z: Tensor
    t: Tensor
    lower: Tensor
    label: Tensor | None


class Kind(ABC):
    """A training module of the grid, of which samples are measured."""

    tunes: str | None = None
    """The module from whose run of the same seed, with one-sample targets, a run starts; None for random weights."""
    batches = 1
    """How many times as many images as those of the set's runs a step has."""
    few_steps = False
    """Tells whether the module samples in one step or two."""
    more_averages = False
    """Tells whether averages of the weights of other lengths are measured, too."""

    module: type[Any]
    """The module's class."""
    fixed: Mapping[str, Any] = {}
    """Options of the module besides `options`."""
    net_options: Mapping[str, Any] = {}
    """Options of the network that the kind needs."""

    def steps(self, lengths: Lengths) -> int:
        """Return the number of optimiser steps."""
        return lengths.steps

    @abstractmethod
    def options(self, steps: int) -> dict[str, Any]:
        """Return the module's options for a run of `steps` steps, in JSON types."""

    def make(
        self, net: nn.Module, plug_ins: PlugIns, seed: int, steps: int, start: Path | None
    ) -> EstimatorTraining:
        """Make the module for a run of `steps` steps, from the checkpoint `start` if the kind tunes."""
        options = {**self.options(steps), **self.fixed, **({"start": start} if self.tunes else {})}
        if classes_of(net):
            options["class_conditional"] = True
        return self.module(net=net, **plug_ins, seed=seed, **options)


class LatentKind(Kind):
    """A training module whose loss, error and gradient are measured, too, at fixed latents."""

    process: Process = EDM_PROCESS
    """The process of the latents."""

    @abstractmethod
    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw times t and lower levels, (size,) float64 each, from the module's distribution in training."""

    @abstractmethod
    def losses(
        self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Compute the training loss of each latent, (B,), with a target drawn afresh."""

    @abstractmethod
    def exact_output(self, latents: Latents, exact: Estimator) -> Tensor:
        """Compute the target that has no error, (B, *shape)."""

    @abstractmethod
    def errors(self, module: Any, latents: Latents, wanted: Tensor) -> Tensor:
        """Compare the network with exact targets: (B,), means over dimensions."""

    def latents(self, reference: ReferenceSet, size: int, part: int) -> Latents:
        """Draw latents of images of the set; they are the same for all estimators and seeds."""
        generator = keyed_generator("cpu", size, part, LATENTS)
        ids = torch.randint(reference.N, (size,), generator=generator)
        x, label = (
            reference.gather(ids),
            None if reference.labels is None else reference.labels[ids],
        )
        t, lower = self.levels(size, generator)
        z = forward_noise(x, t, torch.randn(x.shape, generator=generator), self.process)
        return Latents(x, z, t, lower, label)
