"""EDM and flow matching: the network is fitted to the posterior mean itself."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.learning_curves.kinds import Kind, Latents
from lit_knn.estimators import Estimator, Exact
from lit_knn.modules import LitEDM, LitFlow
from lit_knn.modules.base import EstimatorTraining
from lit_knn.modules.time_distributions import UniformTimes
from lit_knn.sampling.schedules import log_normal_sigmas
from lit_knn.theory.noise import LINEAR_PROCESS, under_process


class Regression(Kind):
    """A module whose exact target is the posterior mean, Eq. 8 (eq:posterior_mean). Its error has the loss's weight."""

    def losses(self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator) -> Tensor:
        mean = under_process(module.estimator.posterior_mean, self.process)
        return self.errors(module, latents, mean(latents.z, latents.t, source, generator))

    def exact_output(self, latents: Latents, exact: Exact) -> Tensor:
        return under_process(exact.posterior_mean, self.process)(latents.z, latents.t)

    def errors(self, module: Any, latents: Latents, wanted: Tensor) -> Tensor:
        return module.item_losses(latents.z, latents.t, wanted, None, None)


class EDM(Regression):
    """`LitEDM`."""

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/table2/digits.yaml."""
        return {"lr": 2e-3, "lr_ramp_up_images": 10_000, "ema_half_life_images": 20_000, "sampling_steps": 12}

    def make(
        self, net: nn.Module, estimator: Estimator, seed: int, steps: int, start: Path | None
    ) -> EstimatorTraining:
        return LitEDM(net, estimator, measure_target=False, seed=seed, **self.options(steps))

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Kind.levels`; EDM's default."""
        t = log_normal_sigmas(size, generator=generator)
        return t, t


class Flow(Regression):
    """`LitFlow` with a network that puts out velocities, at uniform times."""

    process = LINEAR_PROCESS
    # A velocity is (z − μ)/τ, so errors of μ count much at small τ.
    exact = Exact

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/flow/digits.yaml."""
        return EDM().options(steps)

    def make(
        self, net: nn.Module, estimator: Estimator, seed: int, steps: int, start: Path | None
    ) -> EstimatorTraining:
        return LitFlow(net, estimator, measure_target=False, seed=seed, **self.options(steps))

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        t = UniformTimes().draw(size, generator)
        return t, t
