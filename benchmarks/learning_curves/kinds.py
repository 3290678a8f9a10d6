"""The training modules of the learning curves: how each is made, its loss at fixed latents, and its exact target."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.learning_curves.grid import PlugIns
from benchmarks.learning_curves.sets import Lengths
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import Estimator
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT, LitMeanFlow
from lit_knn.modules.base import EstimatorTraining
from lit_knn.modules.time_distributions import LogitNormalTimes, UniformTimes
from lit_knn.nets.average_velocity import GAP_FEATURES
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.distances import squared_euclidean
from lit_knn.sampling.noise_grid import karras_sigmas
from lit_knn.sampling.schedules import (
    TuningSchedule,
    consistency_weight,
    log_normal_sigmas,
    lognormal_step_probs,
)
from lit_knn.sampling.solvers import heun_step
from lit_knn.theory.noise import (
    EDM_PROCESS,
    LINEAR_PROCESS,
    Process,
    forward_noise,
    per_item,
    under_process,
)

# These streams are the last parts of keys; those of training and of the measurements in lit_knn are below 20.
LATENTS, SOURCES, REPEATS, INITIAL_WEIGHTS, NEIGHBOURHOOD = 30, 31, 32, 33, 34
FLOW_STEPS = 24
SIGMA_MIN = 0.002
P_STD = 2.0  # the default of LitECT
NOT_MEASURED = MappingProxyType({"measure_target": False})


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
    """A training module of the grid."""

    process: Process = EDM_PROCESS
    """The process of the latents."""
    tunes = False
    """Tells whether a run starts from the end of the EDM run of the same seed with one-sample targets."""
    few_steps = False
    """Tells whether the module samples in one step or two."""

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
        if getattr(net, "num_classes", 0) > 0:
            options["class_conditional"] = True
        return self.module(net=net, **plug_ins, seed=seed, **options)

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


class Regression(Kind):
    """A module whose exact target is the posterior mean, Eq. 8 (eq:posterior_mean). Its error has the loss's weight."""

    def losses(
        self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator
    ) -> Tensor:
        mean = under_process(module.estimator.posterior_mean, self.process)
        return self.errors(
            module, latents, mean(latents.z, latents.t, source, generator, latents.label)
        )

    def exact_output(self, latents: Latents, exact: Estimator) -> Tensor:
        return under_process(exact.posterior_mean, self.process)(
            latents.z, latents.t, None, None, latents.label
        )

    def errors(self, module: Any, latents: Latents, wanted: Tensor) -> Tensor:
        return module.item_losses(latents.z, latents.t, wanted, latents.label, None)


class EDM(Regression):
    """`LitEDM`."""

    module, fixed = LitEDM, NOT_MEASURED

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; those of configs/table2/digits.yaml, but for sampling steps and augmentation."""
        return {
            "lr": 2e-3,
            "lr_ramp_up_images": 10_000,
            "ema_half_life_images": 20_000,
            "sampling_steps": 12,
        }

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Kind.levels`; EDM's default."""
        t = log_normal_sigmas(size, generator=generator)
        return t, t


class Flow(Regression):
    """`LitFlow` with a network that puts out velocities, at uniform times."""

    module, fixed, process = LitFlow, NOT_MEASURED, LINEAR_PROCESS

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; those of configs/flow/digits.yaml, but for sampling steps and augmentation."""
        return EDM().options(steps)

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        t = UniformTimes().draw(size, generator)
        return t, t


class Consistency(Kind):
    """A consistency model. All estimators take Heun's step; with one-sample targets it equals Euler's."""

    few_steps = True

    def steps(self, lengths: Lengths) -> int:
        return lengths.consistency_steps

    def losses(
        self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator
    ) -> Tensor:
        """See `Kind.losses`; Eq. 7 (eq:CM) at fixed (z, t)."""

        def mean(z: Tensor, t: Tensor) -> Tensor:
            return module.estimator.posterior_mean(z, t, source, generator)

        _, z, t, lower, _ = latents
        student = module.consistency_function(z, t)
        with torch.no_grad():
            teacher = module.consistency_function(module.solver(z, t, lower, mean), lower)
        return consistency_weight(t, lower).float() * module.metric(student, teacher)

    def errors(self, module: Any, latents: Latents, wanted: Tensor) -> Tensor:
        return (
            (module.consistency_function(latents.z, latents.t) - wanted).square().flatten(1).mean(1)
        )

    def exact_output(self, latents: Latents, exact: Estimator) -> Tensor:
        """See `Kind.exact_output`: the end of the probability flow from (z, t)."""
        return flow_end(latents.z, latents.t, exact.posterior_mean)


class ICT(Consistency):
    """`LitICT`, whose function is the identity at σ_min."""

    module = LitICT

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/table1/digits.yaml."""
        return {
            "lr": 3e-3,
            "ema_decay": 0.995,
            "total_steps": steps,
            "s0": 10,
            "s1": 20,
            "P_mean": -0.5,
        }

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Kind.levels`; the pairs of neighbours of the last and finest grid."""
        sigmas = karras_sigmas(self.options(1)["s1"] + 1)
        probs = lognormal_step_probs(sigmas, self.options(1)["P_mean"])
        lower = torch.multinomial(probs, size, replacement=True, generator=generator)
        return sigmas[lower + 1], sigmas[lower]


class ECT(Consistency):
    """`LitECT`, whose function is the identity at 0. It tunes the EDM run of the same seed with one-sample targets."""

    module, tunes = LitECT, True

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; those of configs/ect/digits.yaml, with a slower average for twice the steps."""
        stages = {"stages": 4, "stage_steps": max(steps // 4, 1)}
        return {"lr": 1e-3, "ema_decay": 0.99, "P_mean": -0.5, **stages}

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Kind.levels`; those of the last stage."""
        t = log_normal_sigmas(size, self.options(1)["P_mean"], P_STD, generator)
        stages = self.options(1)["stages"]
        return t, TuningSchedule(stages=stages).teacher_level(t, stages)

    def exact_output(self, latents: Latents, exact: Estimator) -> Tensor:
        """See `Consistency.exact_output`; the last step, to 0, gives the posterior mean."""
        end = super().exact_output(latents, exact)
        return exact.posterior_mean(end, latents.t.clamp(max=SIGMA_MIN))


class SquaredECT(ECT):
    """`LitECT` with the squared distance, with which all targets without bias have one optimum."""

    fixed = MappingProxyType({"metric": squared_euclidean})


class MeanFlow(Kind):
    """`LitMeanFlow`, at the times of its training with r < t."""

    module, fixed, process = LitMeanFlow, NOT_MEASURED, LINEAR_PROCESS
    few_steps = True
    net_options = MappingProxyType({"augment_dim": GAP_FEATURES})

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/meanflow/digits.yaml."""
        return {"lr": 2e-3, "lr_ramp_up_images": 10_000, "ema_half_life_images": 20_000}

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        times = LogitNormalTimes(-2.0, 2.0)
        pairs = torch.stack([times.draw(size, generator), times.draw(size, generator)])
        return pairs.amax(0), pairs.amin(0)

    def losses(
        self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator
    ) -> Tensor:
        """See `Kind.losses`; MeanFlow's identity at fixed (z, r, t)."""
        _, z, t, r, _ = latents

        def mean(estimator: Estimator) -> Tensor:
            return under_process(estimator.posterior_mean, self.process)(z, t, source, generator)

        target = mean(module.estimator)
        return module.errors(
            z, r, t, target, target if module.tangent is None else mean(module.tangent)
        )

    def errors(self, module: Any, latents: Latents, wanted: Tensor) -> Tensor:
        return (
            (module.flow(latents.z, latents.t, r=latents.lower) - wanted)
            .square()
            .flatten(1)
            .mean(1)
        )

    def exact_output(self, latents: Latents, exact: Estimator) -> Tensor:
        """See `Kind.exact_output`: the average velocity of the exact flow, integrated in the EDM process."""
        z, (t, r) = (
            latents.z.double(),
            (per_item(each, latents.z) for each in (latents.t, latents.lower)),
        )
        sigma, low = (self.process.sigma(each) for each in (latents.t, latents.lower))
        end = (1 - r) * flow_end((z / (1 - t)), sigma, exact.posterior_mean, low)
        return ((z - end) / (t - r)).to(latents.z.dtype)


class SquaredMeanFlow(MeanFlow):
    """`LitMeanFlow` without the adaptive weight, so that all targets without bias have one optimum."""

    def options(self, steps: int) -> dict[str, Any]:
        return super().options(steps) | {"power": 0.0}


def flow_end(
    z: Tensor,
    t: Tensor,
    mean: Callable[[Tensor, Tensor], Tensor],
    low: Tensor | None = None,
    rho: float = 7.0,
) -> Tensor:
    """Integrate Eq. 3 (eq:pfode) from each item's t (B,) down to `low` (B,), or to σ_min, in float64: (B, *shape).

    It takes `FLOW_STEPS` Heun steps, evenly spaced in t^(1/rho). Items below their end stay as they are.
    """
    share = torch.linspace(1, 0, FLOW_STEPS + 1, dtype=torch.float64)
    least = (torch.full_like(t, SIGMA_MIN) if low is None else low).double() ** (1 / rho)
    levels = (least + share[:, None] * (t.double() ** (1 / rho) - least)) ** rho
    y = z.double()
    for now, following in pairwise(levels):
        moved = heun_step(y, now, following, lambda v, s: mean(v.float(), s).double())
        y = torch.where(per_item(now > following, y), moved, y)
    return y.to(z.dtype)


# In the order of the report.
KINDS: dict[str, Kind] = {
    "EDM": EDM(),
    "flow": Flow(),
    "iCT": ICT(),
    "ECT": ECT(),
    "MeanFlow": MeanFlow(),
    "MeanFlow power 0": SquaredMeanFlow(),
    "ECT squared": SquaredECT(),
}
