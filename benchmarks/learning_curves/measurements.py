"""Measures a run: the error at held latents, the Fréchet distance, and the variance of the gradient."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.learning_curves.kinds import REPEATS, SOURCES, Kind, Latents
from benchmarks.learning_curves.sets import Lengths
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import Estimator, Exact, MonteCarlo, OneSample
from lit_knn.metrics import Pixels
from lit_knn.metrics.fidelity import frechet_distance_of_statistics, image_statistics
from lit_knn.modules.base import EstimatorTraining
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import Process, under_process

# The two parts of the keys of latents: no latent of the error is one of the gradient.
HELD, PAIRS = 0, 1


class GradientMoments(NamedTuple):
    """Mean and variance of a random gradient g.

    Attributes:
        variance: trace of the covariance of g, unbiased.
        variance_se: standard error of `variance` over the repeats.
        norm_sq: ‖E g‖², unbiased: the squared norm of the sample mean, less variance/R. It may be negative.
    """

    variance: float
    variance_se: float
    norm_sq: float


def gradient_moments(gradients: Iterable[Tensor]) -> GradientMoments:
    """Compute the moments from R >= 2 independent draws of the gradient, each (P,)."""
    g = torch.stack(list(gradients)).double()
    repeats = len(g)
    mean = g.mean(0)
    # The mean of these R numbers is the trace of the covariance, because the sample mean takes one degree of freedom.
    deviations = (g - mean).square().sum(1) * (repeats / (repeats - 1))
    variance = deviations.mean()
    norm_sq = mean.square().sum() - variance / repeats
    return GradientMoments(variance.item(), (deviations.std() / repeats**0.5).item(), norm_sq.item())


def flat_gradient(objective: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the gradient of a scalar with respect to all parameters in one vector, (P,); 0 where there is none."""
    with torch.enable_grad():
        own = [each for each in parameters if each.requires_grad]
        found = torch.autograd.grad(objective(), own, allow_unused=True)
    pairs = zip(found, own, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g.detach()).flatten() for g, p in pairs])


class Measurements:
    """The measurements of one kind of module on one set. All runs have the same latents, sources and their draws.

    The noise of samples is the same for all estimators and another one for each seed of the training. So the difference
    of two estimators varies over seeds with the noise, too, and its t-interval covers it. For EDM's digits the
    difference of two estimators has a standard deviation of about 0.06 over sets of 384 samples of the same networks.

    Args:
        kind: the kind of module.
        reference: the set.
        lengths: numbers of latents, samples and repeats.
    """

    def __init__(self, kind: Kind, reference: ReferenceSet, lengths: Lengths) -> None:
        self.kind, self.lengths = kind, lengths
        self.held = kind.latents(reference, lengths.held, HELD)
        self.wanted = kind.exact_output(self.held, Exact().bind(reference))
        self.pairs = kind.latents(reference, lengths.pairs, PAIRS)
        self.sources = posterior_sources(reference, kind.process, self.pairs, lengths.repeats)
        self.pixels = Pixels()
        self.real = image_statistics(reference, self.pixels)

    @torch.no_grad()
    def error(self, module: EstimatorTraining) -> float:
        """Compute the mean error of the network at the held latents, per dimension."""
        return self.kind.errors(module, self.held, self.wanted).mean().item()

    def distances(self, module: EstimatorTraining) -> dict[str, float]:
        """Compute `fd_pixels` of samples, and of each half of them. The k-th seed has the k-th set of noise."""
        numbers = torch.arange(self.lengths.samples) + module.hparams.seed * self.lengths.samples
        samples = torch.cat([module.sample(seeds) for seeds in numbers.split(128)])
        half = len(samples) // 2
        parts = {"fd_pixels": samples, "fd_first_half": samples[:half], "fd_second_half": samples[half:]}
        return {
            name: frechet_distance_of_statistics(image_statistics(part, self.pixels), self.real)
            for name, part in parts.items()
        }

    def gradients(self, module: Any, estimator: Estimator) -> GradientMoments:
        """Compute mean and variance of the gradient at the fixed pairs, with targets of `estimator`.

        Repeat r has the r-th source of each pair, drawn from the exact posterior, and its own randomness.
        """
        own, module.estimator = module.estimator, estimator
        try:
            return gradient_moments(self._gradient(module, repeat) for repeat in range(self.lengths.repeats))
        finally:
            module.estimator = own

    def _gradient(self, module: Any, repeat: int) -> Tensor:
        generator = keyed_generator("cpu", repeat, REPEATS)

        def objective() -> Tensor:
            loss = self.kind.losses(module, self.pairs, self.sources[:, repeat], generator)
            return module.objective(loss, self.pairs.x)

        return flat_gradient(objective, module.parameters())

    def gradient_row(self, module: EstimatorTraining) -> dict[str, float]:
        """Return the moments for the run's estimator, and the variance of one-sample targets at the same weights."""
        own = self.gradients(module, module.estimator)
        plain = own if isinstance(module.estimator, OneSample) else self.gradients(module, OneSample())
        return {
            "gradient_variance": own.variance,
            "gradient_variance_se": own.variance_se,
            "gradient_norm_sq": own.norm_sq,
            "one_sample_variance": plain.variance,
        }


def posterior_sources(reference: ReferenceSet, process: Process, latents: Latents, repeats: int) -> Tensor:
    """Draw images from the exact posterior of each latent, Eq. 2 (eq:posterior): (B, repeats, *shape).

    At a fixed z the source of z is random, and this is its distribution. Given a source from it, the one-sample target
    is unbiased.
    """
    estimator = MonteCarlo(n=repeats).bind(reference)
    generator = keyed_generator("cpu", len(latents.z), repeats, SOURCES)
    return reference.gather(under_process(estimator.posterior_ids, process)(latents.z, latents.t, generator))
