"""The training modules of the learning curves: how each is made, its loss at fixed latents, and its exact output."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_knn.edm import LitEDM
from lit_knn.estimators import Estimator, Exact, OneSample
from lit_knn.ict import LitICT
from lit_knn.reference import ReferenceSet
from lit_knn.rng import keyed_generator
from lit_knn.schedules import consistency_weight, karras_sigmas, log_normal_sigmas, lognormal_step_probs, pseudo_huber
from lit_knn.solvers import euler_step, heun_step
from lit_knn.theory.noise import forward_noise, per_item
from lit_knn.training.base import EstimatorTraining

# These streams are the last parts of keys; those of training and of the measurements in lit_knn are below 20.
LATENTS, SOURCES, REPEATS, INITIAL_WEIGHTS = 30, 31, 32, 33
FLOW_STEPS = 24


class Latents(NamedTuple):
    """Fixed latents. `t_prev` is the lower level of a consistency module, else equal to `t`."""

    x: Tensor
    z: Tensor
    t: Tensor
    t_prev: Tensor


class Kind(ABC):
    """A training module of the grid."""

    @abstractmethod
    def make(self, net: nn.Module, estimator: Estimator, seed: int, steps: int) -> EstimatorTraining:
        """Make the module for a run of `steps` steps."""

    @abstractmethod
    def options(self, steps: int) -> dict[str, Any]:
        """Return the options that differ from the module's defaults, in JSON types."""

    @abstractmethod
    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw t and t_prev, (size,) float64 each, from the module's distribution in training."""

    @abstractmethod
    def losses(self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator) -> Tensor:
        """Compute the training loss of each latent, (B,), with a target drawn afresh."""

    @abstractmethod
    def exact_output(self, latents: Latents, exact: Exact) -> Tensor:
        """Compute what the network would return at (z, t) without any error, (B, *shape)."""

    @abstractmethod
    def error(self, output: Tensor, wanted: Tensor, t: Tensor) -> Tensor:
        """Compare outputs with exact ones: (B,), a mean over dimensions."""

    def latents(self, reference: ReferenceSet, size: int, part: int) -> Latents:
        """Draw latents of images of the set; they are the same for all estimators and seeds."""
        generator = keyed_generator("cpu", size, part, LATENTS)
        x = reference.gather(torch.randint(reference.N, (size,), generator=generator))
        t, t_prev = self.levels(size, generator)
        return Latents(x, forward_noise(x, t, torch.randn(x.shape, generator=generator)), t, t_prev)


class EDM(Kind):
    """`LitEDM`. Its exact output is the posterior mean, and its error has the weight of the loss."""

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/table2/digits.yaml."""
        return {"lr": 2e-3, "lr_ramp_up_images": 10_000, "ema_half_life_images": 20_000, "sampling_steps": 12}

    def make(self, net: nn.Module, estimator: Estimator, seed: int, steps: int) -> EstimatorTraining:
        """See `Kind.make`."""
        return LitEDM(net, estimator, measure_target=False, seed=seed, **self.options(steps))

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Kind.levels`."""
        t = log_normal_sigmas(size, generator=generator)
        return t, t

    def losses(self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator) -> Tensor:
        """See `Kind.losses`."""
        target = module.estimator.posterior_mean(latents.z, latents.t, source, generator)
        return self.error(module.denoiser(latents.z, latents.t), target, latents.t)

    def exact_output(self, latents: Latents, exact: Exact) -> Tensor:
        """See `Kind.exact_output`: E[x|z,t], Eq. 8 (eq:posterior_mean)."""
        return exact.posterior_mean(latents.z, latents.t)

    def error(self, output: Tensor, wanted: Tensor, t: Tensor, sigma_data: float = 0.5) -> Tensor:
        """See `Kind.error`; λ(σ) = (σ² + σ_data²)/(σ·σ_data)² (Karras et al. 2022)."""
        weight = (t.square() + sigma_data**2) / (t * sigma_data).square()
        return weight.float() * (output - wanted).square().flatten(1).mean(1)


class ICT(Kind):
    """`LitICT`. Its exact output is the end of the probability flow from (z, t), integrated with the exact mean."""

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; the options of configs/table1/digits.yaml."""
        return {"lr": 3e-3, "ema_decay": 0.995, "total_steps": steps, "s0": 10, "s1": 20, "P_mean": -0.5}

    def make(self, net: nn.Module, estimator: Estimator, seed: int, steps: int) -> EstimatorTraining:
        """See `Kind.make`; plain iCT takes Euler's step, as in the paper, and the other estimators Heun's."""
        solver = euler_step if isinstance(estimator, OneSample) else heun_step
        return LitICT(net, estimator, solver, seed=seed, **self.options(steps))

    def levels(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Kind.levels`; the pairs of neighbours of the last and finest grid."""
        sigmas = karras_sigmas(self.options(1)["s1"] + 1)
        probs = lognormal_step_probs(sigmas, self.options(1)["P_mean"])
        lower = torch.multinomial(probs, size, replacement=True, generator=generator)
        return sigmas[lower + 1], sigmas[lower]

    def losses(self, module: Any, latents: Latents, source: Tensor, generator: torch.Generator) -> Tensor:
        """See `Kind.losses`."""

        def mean(z: Tensor, t: Tensor) -> Tensor:
            return module.estimator.posterior_mean(z, t, source, generator)

        _, z, t, t_prev = latents
        student = module.consistency_function(z, t)
        with torch.no_grad():
            teacher = module.consistency_function(module.solver(z, t, t_prev, mean), t_prev)
        return consistency_weight(t, t_prev).float() * pseudo_huber(student, teacher)

    def exact_output(self, latents: Latents, exact: Exact) -> Tensor:
        """See `Kind.exact_output`: Heun steps of Eq. 3 (eq:pfode) from each t to σ_min, evenly spaced in t^(1/7)."""
        return flow_end(latents.z, latents.t, exact.posterior_mean)

    def error(self, output: Tensor, wanted: Tensor, t: Tensor) -> Tensor:
        """See `Kind.error`."""
        return (output - wanted).square().flatten(1).mean(1)


def flow_end(
    z: Tensor, t: Tensor, mean: Callable[[Tensor, Tensor], Tensor], sigma_min: float = 0.002, rho: float = 7.0
) -> Tensor:
    """Integrate Eq. 3 (eq:pfode) from each item's t (B,) down to sigma_min, in float64: (B, *shape)."""
    share = torch.linspace(1, 0, FLOW_STEPS + 1, dtype=torch.float64)
    low, high = sigma_min ** (1 / rho), t.double() ** (1 / rho)
    levels = (low + share[:, None] * (high - low)) ** rho
    y = z.double()
    for now, following in pairwise(levels):
        # Items that start at sigma_min have nothing to integrate.
        moved = heun_step(y, now, following, lambda v, s: mean(v.float(), s).double())
        y = torch.where(per_item(now > following, y), moved, y)
    return y.to(z.dtype)


KINDS: dict[str, Kind] = {"EDM": EDM(), "iCT": ICT()}
