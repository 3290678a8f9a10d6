"""Continuous-time consistency training as a kind of the learning curves."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_curves.few_step_kinds import ECT
from benchmarks.learning_curves.kind import Latents
from lit_knn.modules import LitSCT
from lit_knn.modules.shared_dropout import SharedDropout
from lit_knn.sampling.noise_grid import EDM_GRID
from lit_knn.sampling.schedules import truncated_log_normal_sigmas


class SCT(ECT):
    """`LitSCT`. As `LitECT`, it tunes EDM's run, and its function is the identity at 0."""

    module = LitSCT

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/sct/digits.yaml."""
        return {
            "lr": 3e-4,
            "ema_decay": 0.99,
            "tangent_warmup_steps": steps // 30,
            "tangent_floor": 0.1,
            "adaptive_weight": True,
        }

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `LatentKind.levels`; the defaults of `LitSCT`."""
        ends = EDM_GRID.noise_range()
        t = truncated_log_normal_sigmas(size, -1.0, 1.4, *ends, generator)
        return t, t

    def losses(
        self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator
    ) -> Tensor:
        """See `LatentKind.losses`; their gradient is that of training after the warm-up."""
        mean = module.estimator.posterior_mean(latents.z, latents.t, source, generator)
        dropout = SharedDropout(latents.z.device, 0)
        return module.item_losses(latents.z, latents.t, mean, 1.0, dropout)
