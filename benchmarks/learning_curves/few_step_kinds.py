"""The modules that sample in one step or two: consistency models and mean flows."""

from collections.abc import Callable
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_curves.kind import NOT_MEASURED, LatentKind, Latents
from benchmarks.learning_curves.sets import Lengths
from lit_knn.estimators import Estimator
from lit_knn.modules import LitECT, LitICT, LitMeanFlow
from lit_knn.modules.time_distributions import LogitNormalTimes
from lit_knn.nets.average_velocity import GAP_FEATURES
from lit_knn.sampling.noise_grid import karras_sigmas
from lit_knn.sampling.schedules import (
    TuningSchedule,
    consistency_weight,
    log_normal_sigmas,
    lognormal_step_probs,
)
from lit_knn.sampling.solvers import heun_step
from lit_knn.theory.noise import LINEAR_PROCESS, per_item, under_process

FLOW_STEPS = 24
RHO = 7.0  # of the levels of the integration, as in EDM's sampler
SIGMA_MIN = 0.002
P_STD = 2.0  # the default of LitECT


class Consistency(LatentKind):
    """A consistency model. All estimators take Heun's step; with one-sample targets it equals Euler's."""

    few_steps = True

    def steps(self, lengths: Lengths) -> int:
        return lengths.consistency_steps

    def losses(
        self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator
    ) -> Tensor:
        """See `LatentKind.losses`; Eq. 7 (eq:CM) at fixed (z, t)."""

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
        """See `LatentKind.exact_output`: the end of the probability flow from (z, t)."""
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
        """See `LatentKind.levels`; the pairs of neighbours of the last and finest grid."""
        sigmas = karras_sigmas(self.options(1)["s1"] + 1)
        probs = lognormal_step_probs(sigmas, self.options(1)["P_mean"])
        lower = torch.multinomial(probs, size, replacement=True, generator=generator)
        return sigmas[lower + 1], sigmas[lower]


class ECT(Consistency):
    """`LitECT`, whose function is the identity at 0. It tunes the EDM run of the same seed with one-sample targets."""

    module: type[Any] = LitECT
    tunes: str | None = "EDM"

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; those of configs/ect/digits.yaml, with a slower average for twice the steps."""
        stages = {"stages": 4, "stage_steps": max(steps // 4, 1)}
        return {"lr": 1e-3, "ema_decay": 0.99, "P_mean": -0.5, **stages}

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `LatentKind.levels`; those of the last stage."""
        options = self.options(1)
        t = log_normal_sigmas(size, options["P_mean"], P_STD, generator)
        schedule = TuningSchedule(k=options.get("k", TuningSchedule.k), stages=options["stages"])
        return t, schedule.teacher_level(t, schedule.stages)

    def exact_output(self, latents: Latents, exact: Estimator) -> Tensor:
        """See `Consistency.exact_output`; the last step, to 0, gives the posterior mean."""
        end = super().exact_output(latents, exact)
        return exact.posterior_mean(end, latents.t.clamp(max=SIGMA_MIN))


class MeanFlow(LatentKind):
    """`LitMeanFlow`, at the times of its training with r < t."""

    module, fixed, process = LitMeanFlow, NOT_MEASURED, LINEAR_PROCESS
    few_steps = True
    net_options = MappingProxyType({"augment_dim": GAP_FEATURES})

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/meanflow/digits.yaml."""
        return {"lr": 2e-3, "lr_ramp_up_images": 10_000, "ema_half_life_images": 20_000}

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `LatentKind.levels`; pairs of the default distribution."""
        times = LogitNormalTimes(-2.0, 2.0)
        pairs = torch.stack([times.draw(size, generator), times.draw(size, generator)])
        return pairs.amax(0), pairs.amin(0)

    def losses(
        self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator
    ) -> Tensor:
        """See `LatentKind.losses`; MeanFlow's identity at fixed (z, r, t)."""
        _, z, t, r, _ = latents

        def mean(estimator: Estimator) -> Tensor:
            return under_process(estimator.posterior_mean, self.process)(z, t, source, generator)

        target = mean(module.estimator)
        return module.errors(z, r, t, target, module.tangent_mean(target, mean))

    def errors(self, module: Any, latents: Latents, wanted: Tensor) -> Tensor:
        return (
            (module.flow(latents.z, latents.t, r=latents.lower) - wanted)
            .square()
            .flatten(1)
            .mean(1)
        )

    def exact_output(self, latents: Latents, exact: Estimator) -> Tensor:
        """See `LatentKind.exact_output`: the average velocity of the exact flow, integrated in the EDM process."""
        z, (t, r) = (
            latents.z.double(),
            (per_item(each, latents.z) for each in (latents.t, latents.lower)),
        )
        sigma, low = (self.process.sigma(each) for each in (latents.t, latents.lower))
        end = (1 - r) * flow_end((z / (1 - t)), sigma, exact.posterior_mean, low)
        return ((z - end) / (t - r)).to(latents.z.dtype)


def flow_end(
    z: Tensor,
    t: Tensor,
    mean: Callable[[Tensor, Tensor], Tensor],
    low: Tensor | None = None,
) -> Tensor:
    """Integrate Eq. 3 (eq:pfode) from each item's t (B,) down to `low` (B,), or to σ_min, in float64: (B, *shape).

    It takes `FLOW_STEPS` Heun steps, evenly spaced in t^(1/7). Items below their end stay as they are.
    """
    share = torch.linspace(1, 0, FLOW_STEPS + 1, dtype=torch.float64)
    least = (torch.full_like(t, SIGMA_MIN) if low is None else low).double() ** (1 / RHO)
    levels = (least + share[:, None] * (t.double() ** (1 / RHO) - least)) ** RHO
    y = z.double()
    for now, following in pairwise(levels):
        moved = heun_step(y, now, following, lambda v, s: mean(v.float(), s).double())
        y = torch.where(per_item(now > following, y), moved, y)
    return y.to(z.dtype)
