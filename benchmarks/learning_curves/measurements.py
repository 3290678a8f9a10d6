"""Measures a run: its errors at held latents, its samples, and the variance of the gradient."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning_curves.agreement import Agreement
from benchmarks.learning_curves.gradient_moments import (
    GradientMoments,
    flat_gradient,
    gradient_moments,
)
from benchmarks.learning_curves.kind import (
    REPEATS,
    SOURCES,
    LatentKind,
    Latents,
)
from benchmarks.learning_curves.quality import Quality
from benchmarks.learning_curves.sample_measurements import SampleMeasurements
from benchmarks.learning_curves.sets import Images, Lengths
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import (
    Estimator,
    Exact,
    MonteCarlo,
    OneSample,
    class_conditional,
)
from lit_knn.modules.base import EstimatorTraining
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import Process, under_process

# Parts of the keys of latents: of the error, of the gradient, and of held-out images.
HELD, PAIRS, NEW = 0, 1, 2


class Measurements(SampleMeasurements):
    """The measurements of one kind of module on one set. All runs have the same latents, sources and their draws.

    Args:
        kind: the kind of module.
        images: the images of the set. If it is trained by class, the gradient is not measured.
        lengths: numbers of latents, samples and repeats.
        quality: measures the samples.
    """

    def __init__(
        self, kind: LatentKind, images: Images, lengths: Lengths, quality: Quality | None = None
    ) -> None:
        super().__init__(kind, lengths, quality)
        self.kind: LatentKind = kind
        reference = images.training
        self.held = kind.latents(reference, lengths.held, HELD)
        exact = Exact() if reference.labels is None else class_conditional(Exact())
        self.exact = exact.bind(reference)
        self.wanted = kind.exact_output(self.held, self.exact)
        self.new = (
            None if images.held_out is None else kind.latents(images.held_out, lengths.held, NEW)
        )
        self.agreement = Agreement(kind, self.new, reference)
        self.pairs = kind.latents(reference, lengths.pairs, PAIRS)
        if reference.labels is None:
            self.sources = posterior_sources(reference, kind.process, self.pairs, lengths.repeats)

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
        return row | self.agreement.distances(module)

    def gradients(self, module: Any) -> GradientMoments:
        """Compute the moments of the gradient at the fixed pairs, with the targets of the module.

        Repeat r has the r-th source of each pair, drawn from the exact posterior, and its own randomness.
        """
        with same_targets(module, self.exact):
            exact = self.gradient(module, 0)
        repeats = range(self.lengths.repeats)
        return gradient_moments((self.gradient(module, repeat) for repeat in repeats), exact)

    def gradient(self, module: Any, repeat: int) -> Tensor:
        """Return the gradient at the fixed pairs with the draws of one repeat, (P,)."""
        generator = keyed_generator("cpu", repeat, REPEATS)

        def objective() -> Tensor:
            loss = self.kind.losses(module, self.pairs, self.sources[:, repeat], generator)
            return module.objective(loss, self.pairs.x)

        return flat_gradient(objective, module.parameters())

    def gradient_row(self, module: EstimatorTraining) -> dict[str, float]:
        """Return the moments for the run's estimator, and those of one-sample targets at the same weights."""
        if self.pairs.label is not None:
            return super().gradient_row(module)
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
    """Replace the estimator of a module, and its tangent, by another estimator within a `with` block."""
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
