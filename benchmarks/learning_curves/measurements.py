"""Measures a run: its errors at held latents, its samples, and the variance of the gradient."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.learning_curves.kinds import (
    NEIGHBOURHOOD,
    REPEATS,
    SOURCES,
    Kind,
    Latents,
    Regression,
)
from benchmarks.learning_curves.quality import Quality
from benchmarks.learning_curves.sets import Images, Lengths
from lit_knn.common.rng import keyed_default_rng, keyed_generator
from lit_knn.estimators import (
    Estimator,
    Exact,
    MonteCarlo,
    OneSample,
    PatchPosterior,
    Smoothed,
    class_conditional,
)
from lit_knn.modules.base import EstimatorTraining
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import Process, under_process

# Parts of the keys of latents: of the error, of the gradient, and of held-out images.
HELD, PAIRS, NEW = 0, 1, 2
GRADIENT_COLUMNS = (
    "gradient_variance",
    "gradient_variance_se",
    "gradient_norm_sq",
    "one_sample_variance",
    "gradient_bias_sq",
    "one_sample_bias_sq",
)
# New latents at which a network is compared with analytic estimators, which take long on many images.
AGREEMENT_LATENTS = 512
# Analytic estimators by column: the exact mean, in whose direction a network memorises, and two of images that are new.
ANALYTIC: dict[str, Callable[[], Estimator]] = {
    "distance_to_exact": Exact,
    "distance_to_patches": PatchPosterior,
    "distance_to_smoothed": lambda: Smoothed(Exact(), width=0.2, n=16),
}


class GradientMoments(NamedTuple):
    """Mean and variance of a random gradient g.

    Attributes:
        variance: trace of the covariance of g, unbiased.
        variance_se: standard error of `variance` over the repeats.
        norm_sq: ‖E g‖², unbiased: the squared norm of the sample mean, less variance/R. It may be negative.
        bias_sq: ‖E g − g'‖² for the gradient g' of exact targets, unbiased likewise.
    """

    variance: float
    variance_se: float
    norm_sq: float
    bias_sq: float


def gradient_moments(gradients: Iterable[Tensor], exact: Tensor) -> GradientMoments:
    """Compute the moments from R >= 2 independent draws of the gradient, each (P,).

    `exact` (P,) is the gradient of exact targets.
    """
    g = torch.stack(list(gradients)).double()
    repeats = len(g)
    mean = g.mean(0)
    # The mean of these R numbers is the trace of the covariance, because the sample mean takes one degree of freedom.
    deviations = (g - mean).square().sum(1) * (repeats / (repeats - 1))
    variance = deviations.mean()
    norm_sq = mean.square().sum() - variance / repeats
    bias_sq = (mean - exact).square().sum() - variance / repeats
    return GradientMoments(
        variance.item(), (deviations.std() / repeats**0.5).item(), norm_sq.item(), bias_sq.item()
    )


def flat_gradient(objective: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the gradient of a scalar with respect to all parameters in one vector, (P,); 0 where there is none."""
    with torch.enable_grad():
        own = [each for each in parameters if each.requires_grad]
        found = torch.autograd.grad(objective(), own, allow_unused=True)
    pairs = zip(found, own, strict=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g.detach()).flatten() for g, p in pairs]
    )


class Measurements:
    """The measurements of one kind of module on one set. All runs have the same latents, sources and their draws.

    The noise of samples is the same for all estimators and another one for each seed of the training. So the difference
    of two estimators varies over seeds with the noise, too, and its t-interval covers it.

    Args:
        kind: the kind of module.
        images: the images of the set. If it is trained by class, the gradient is not measured.
        lengths: numbers of latents, samples and repeats.
        quality: measures the samples.
    """

    def __init__(
        self, kind: Kind, images: Images, lengths: Lengths, quality: Quality | None = None
    ) -> None:
        self.kind, self.lengths, self.quality = kind, lengths, quality
        reference = images.training
        self.held = kind.latents(reference, lengths.held, HELD)
        exact = Exact() if reference.labels is None else class_conditional(Exact())
        self.exact = exact.bind(reference)
        self.wanted = kind.exact_output(self.held, self.exact)
        self.new = (
            None if images.held_out is None else kind.latents(images.held_out, lengths.held, NEW)
        )
        self.analytic = self._analytic_outputs(reference)
        self.pairs = kind.latents(reference, lengths.pairs, PAIRS)
        if reference.labels is None:
            self.sources = posterior_sources(reference, kind.process, self.pairs, lengths.repeats)

    def _analytic_outputs(self, reference: ReferenceSet) -> dict[str, Tensor]:
        """Compute what analytic estimators of the training images put out at new latents: (b, *shape) by column.

        Nothing for modules whose output is no posterior mean, and for sets without new images or by class.
        """
        if self.new is None or self.new.label is not None or not isinstance(self.kind, Regression):
            return {}
        self.some_new = Latents(*(part[:AGREEMENT_LATENTS] for part in self.new[:4]), None)
        outputs = {}
        for column, make in ANALYTIC.items():
            # The neighbourhood of `Smoothed` is drawn.
            with keyed_default_rng(torch.device("cpu"), NEW, NEIGHBOURHOOD):
                outputs[column] = self.kind.exact_output(self.some_new, make().bind(reference))
        return outputs

    @torch.no_grad()
    def errors(self, module: EstimatorTraining) -> dict[str, float]:
        """Compute the error at the held latents, and what is measured at latents of held-out images.

        That is the loss with one-sample targets, and the distances to analytic estimators, with the weight of the loss.
        """
        row = {
            "val_error": self.kind.errors(module, self.held, self.wanted).mean().item(),
            "held_out_loss": math.nan,
        }
        if self.new is not None:
            with same_targets(module, OneSample()):
                losses = self.kind.losses(module, self.new, self.new.x, torch.Generator())
            row["held_out_loss"] = losses.mean().item()
        row |= dict.fromkeys(ANALYTIC, math.nan)
        for column, output in self.analytic.items():
            row[column] = self.kind.errors(module, self.some_new, output).mean().item()
        return row

    def samples(self, module: EstimatorTraining, num_steps: int | None = None) -> Tensor:
        """Draw samples (B, *shape). The k-th seed of the training has the k-th set of noise."""
        numbers = torch.arange(self.lengths.samples) + module.seed * self.lengths.samples
        return torch.cat([module.sample(seeds, num_steps) for seeds in numbers.split(128)])

    def gradients(self, module: Any) -> GradientMoments:
        """Compute the moments of the gradient at the fixed pairs, with the targets of the module.

        Repeat r has the r-th source of each pair, drawn from the exact posterior, and its own randomness.
        """
        with same_targets(module, self.exact):
            exact = self._gradient(module, 0)
        repeats = range(self.lengths.repeats)
        return gradient_moments((self._gradient(module, repeat) for repeat in repeats), exact)

    def _gradient(self, module: Any, repeat: int) -> Tensor:
        generator = keyed_generator("cpu", repeat, REPEATS)

        def objective() -> Tensor:
            loss = self.kind.losses(module, self.pairs, self.sources[:, repeat], generator)
            return module.objective(loss, self.pairs.x)

        return flat_gradient(objective, module.parameters())

    def gradient_row(self, module: EstimatorTraining) -> dict[str, float]:
        """Return the moments for the run's estimator, and those of one-sample targets at the same weights."""
        if self.pairs.label is not None:
            return dict.fromkeys(GRADIENT_COLUMNS, math.nan)
        moments = self.gradients(module)
        with same_targets(module, OneSample()):
            plain = self.gradients(module)
        return {
            "gradient_variance": moments.variance,
            "gradient_variance_se": moments.variance_se,
            "gradient_norm_sq": moments.norm_sq,
            "gradient_bias_sq": moments.bias_sq,
            "one_sample_variance": plain.variance,
            "one_sample_bias_sq": plain.bias_sq,
        }


@contextmanager
def same_targets(module: Any, estimator: Estimator) -> Iterator[None]:
    """Let a module have the targets of another estimator for a while, and as its tangent the same."""
    before = {name: getattr(module, name) for name in module.estimators}
    vars(module).update(dict.fromkeys(before) | {"estimator": estimator})
    try:
        yield
    finally:
        vars(module).update(before)


def posterior_sources(
    reference: ReferenceSet, process: Process, latents: Latents, repeats: int
) -> Tensor:
    """Draw images from the exact posterior of each latent, Eq. 2 (eq:posterior): (B, repeats, *shape).

    At a fixed z the source of z is random, and this is its distribution. Given a source from it, the one-sample target
    is unbiased.
    """
    estimator = MonteCarlo(n=repeats).bind(reference)
    generator = keyed_generator("cpu", len(latents.z), repeats, SOURCES)
    return reference.gather(
        under_process(estimator.posterior_ids, process)(latents.z, latents.t, generator)
    )
