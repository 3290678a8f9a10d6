"""iCT and ECT: the network is fitted to the end of the probability flow."""

from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.learning_curves.kinds import Kind, Latents
from lit_knn.estimators import Estimator, Exact
from lit_knn.modules import LitECT, LitICT
from lit_knn.modules.base import EstimatorTraining
from lit_knn.sampling.schedules import (
    TuningSchedule,
    consistency_weight,
    karras_sigmas,
    log_normal_sigmas,
    lognormal_step_probs,
)
from lit_knn.sampling.solvers import heun_step
from lit_knn.theory.noise import per_item

FLOW_STEPS = 24
SIGMA_MIN = 0.002
P_STD = 2.0  # the default of LitECT


class Consistency(Kind):
    """A consistency model. All estimators take Heun's step; with one-sample targets it equals Euler's."""

    def losses(self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator) -> Tensor:
        """See `Kind.losses`; Eq. 7 (eq:CM) at fixed (z, t)."""

        def mean(z: Tensor, t: Tensor) -> Tensor:
            return module.estimator.posterior_mean(z, t, source, generator)

        _, z, t, lower = latents
        student = module.consistency_function(z, t)
        with torch.no_grad():
            teacher = module.consistency_function(module.solver(z, t, lower, mean), lower)
        return consistency_weight(t, lower).float() * module.metric(student, teacher)

    def errors(self, module: Any, latents: Latents, wanted: Tensor) -> Tensor:
        return (module.consistency_function(latents.z, latents.t) - wanted).square().flatten(1).mean(1)

    @abstractmethod
    def exact_output(self, latents: Latents, exact: Exact) -> Tensor:
        """See `Kind.exact_output`: the end of the probability flow from (z, t)."""


class ICT(Consistency):
    """`LitICT`, whose function is the identity at σ_min."""

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/table1/digits.yaml."""
        return {"lr": 3e-3, "ema_decay": 0.995, "total_steps": steps, "s0": 10, "s1": 20, "P_mean": -0.5}

    def make(
        self, net: nn.Module, estimator: Estimator, seed: int, steps: int, start: Path | None
    ) -> EstimatorTraining:
        return LitICT(net, estimator, seed=seed, **self.options(steps))

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Kind.levels`; the pairs of neighbours of the last and finest grid."""
        sigmas = karras_sigmas(self.options(1)["s1"] + 1)
        probs = lognormal_step_probs(sigmas, self.options(1)["P_mean"])
        lower = torch.multinomial(probs, size, replacement=True, generator=generator)
        return sigmas[lower + 1], sigmas[lower]

    def exact_output(self, latents: Latents, exact: Exact) -> Tensor:
        return flow_end(latents.z, latents.t, exact.posterior_mean)


class ECT(Consistency):
    """`LitECT`, whose function is the identity at 0. It tunes the EDM run of the same seed with one-sample targets."""

    tunes = True

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; those of configs/ect/digits.yaml, with a slower average for twice the steps."""
        stages = {"stages": 4, "stage_steps": max(steps // 4, 1)}
        return {"lr": 1e-3, "ema_decay": 0.99, "P_mean": -0.5, **stages}

    def make(
        self, net: nn.Module, estimator: Estimator, seed: int, steps: int, start: Path | None
    ) -> EstimatorTraining:
        return LitECT(estimator, start, net, seed=seed, **self.options(steps))

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Kind.levels`; those of the last stage."""
        t = log_normal_sigmas(size, self.options(1)["P_mean"], P_STD, generator)
        stages = self.options(1)["stages"]
        return t, TuningSchedule(stages=stages).teacher_level(t, stages)

    def exact_output(self, latents: Latents, exact: Exact) -> Tensor:
        """See `Consistency.exact_output`; the last step, to 0, gives the posterior mean."""
        end = flow_end(latents.z, latents.t, exact.posterior_mean)
        return exact.posterior_mean(end, latents.t.clamp(max=SIGMA_MIN))


def flow_end(z: Tensor, t: Tensor, mean: Callable[[Tensor, Tensor], Tensor], rho: float = 7.0) -> Tensor:
    """Integrate Eq. 3 (eq:pfode) from each item's t (B,) down to σ_min, in float64: (B, *shape).

    It takes `FLOW_STEPS` Heun steps, evenly spaced in t^(1/rho). Items below σ_min stay as they are.
    """
    share = torch.linspace(1, 0, FLOW_STEPS + 1, dtype=torch.float64)
    low, high = SIGMA_MIN ** (1 / rho), t.double() ** (1 / rho)
    levels = (low + share[:, None] * (high - low)) ** rho
    y = z.double()
    for now, following in pairwise(levels):
        moved = heun_step(y, now, following, lambda v, s: mean(v.float(), s).double())
        y = torch.where(per_item(now > following, y), moved, y)
    return y.to(z.dtype)
