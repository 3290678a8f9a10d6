"""Measures the samples of a run. What is measured at fixed latents is NaN."""

import math

import torch
from torch import Tensor

from benchmarks.learning_curves.kind import Kind
from benchmarks.learning_curves.quality import Quality
from benchmarks.learning_curves.sets import Lengths
from lit_knn.common.tables import Row
from lit_knn.modules.base import EstimatorTraining

GRADIENT_COLUMNS = (
    "gradient_variance",
    "gradient_variance_se",
    "gradient_norm_sq",
    "one_sample_variance",
    "gradient_bias_sq",
    "one_sample_bias_sq",
)
ERROR_COLUMNS = (
    "val_error",
    "held_out_loss",
    "distance_to_exact",
    "distance_to_patches",
    "distance_to_smoothed",
)


class SampleMeasurements:
    """The measurements of a kind of module at its samples alone.

    The noise of samples is the same for all estimators and another one for each seed of the training. So the difference
    of two estimators varies over seeds with the noise, too, and its t-interval covers it.

    Args:
        kind: the kind of module.
        lengths: numbers of latents, samples and repeats.
        quality: measures the samples.
    """

    def __init__(self, kind: Kind, lengths: Lengths, quality: Quality | None = None) -> None:
        self.kind, self.lengths, self.quality = kind, lengths, quality

    def errors(self, module: EstimatorTraining) -> dict[str, float]:
        """Return NaN for each error at fixed latents."""
        return dict.fromkeys(ERROR_COLUMNS, math.nan)

    def gradient_row(self, module: EstimatorTraining) -> dict[str, float]:
        """Return NaN for each moment of the gradient."""
        return dict.fromkeys(GRADIENT_COLUMNS, math.nan)

    def samples(self, module: EstimatorTraining, num_steps: int | None = None) -> Tensor:
        """Draw samples (B, *shape). The k-th seed of the training has the k-th set of noise."""
        numbers = torch.arange(self.lengths.samples) + module.seed * self.lengths.samples
        return torch.cat([module.sample(seeds, num_steps) for seeds in numbers.split(128)])

    def quality_row(self, module: EstimatorTraining, samples: Tensor) -> Row:
        """Measure samples of a module, and the pixels of two-step samples if it has few steps."""
        assert self.quality is not None
        row: Row = {**self.quality.measure(samples), "fd_pixels_two_steps": math.nan}
        if self.kind.few_steps:
            row["fd_pixels_two_steps"] = self.quality.fd_pixels(self.samples(module, 2))
        return row
