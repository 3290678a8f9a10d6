"""The modules that regress the posterior mean: EDM and flow matching."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_curves.kind import NOT_MEASURED, LatentKind, Latents
from lit_knn.estimators import Estimator
from lit_knn.modules import LitEDM, LitFlow
from lit_knn.modules.time_distributions import UniformTimes
from lit_knn.sampling.schedules import log_normal_sigmas
from lit_knn.theory.noise import LINEAR_PROCESS, under_process


class Regression(LatentKind):
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
        """See `LatentKind.levels`; EDM's default."""
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
