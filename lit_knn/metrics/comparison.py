"""Metrics of the features of generated images against those of real ones, for `Fidelity` and for `score`."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from lit_knn.common.errors import InputError, check_at_least
from lit_knn.metrics.feature_statistics import FeatureStatistics
from lit_knn.metrics.fidelity import (
    INCEPTION_SCORE_SPLITS,
    KID_SUBSETS,
    factor_of,
    frechet_distance_of_statistics,
    inception_score,
    kernel_distance,
)
from lit_knn.metrics.sample_quality import (
    density_and_coverage,
    neighbour_radii,
    precision_recall,
)

# Metrics that compare single images, and so need the features of each.
EXTRA_METRICS = ("kid", "precision", "recall", "density", "coverage")


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of the metrics.

    Args:
        kid_subset_size: images of each set in one of KID's 100 subsets.
        pr_k: neighbours of precision and recall.
        dc_k: neighbours of density and coverage.
    """

    kid_subset_size: int = 1000
    pr_k: int = 3
    dc_k: int = 5

    def __post_init__(self) -> None:
        check_at_least(2, kid_subset_size=self.kid_subset_size)
        check_at_least(1, pr_k=self.pr_k, dc_k=self.dc_k)


class Comparison:
    """Compares features of generated images with those of real ones.

    Args:
        real: statistics of the real images; with their features if `EXTRA_METRICS` are measured.
        options: options of the metrics.
    """

    def __init__(self, real: FeatureStatistics, options: ComparisonOptions) -> None:
        self.real = real
        self.options = options
        self._factor: Tensor | None = None
        self._radii: dict[int, Tensor] = {}

    def distance(self, generated: FeatureStatistics) -> float:
        """Return the Fréchet distance of generated images to the real ones."""
        finite = self.real.mean.isfinite().all() and self.real.cov.isfinite().all()
        if self._factor is None and finite:
            self._factor = factor_of(self.real.cov)
        return frechet_distance_of_statistics(generated, self.real, self._factor)

    def values(
        self,
        generated: FeatureStatistics,
        names: Collection[str],
        kid_subsets: int = KID_SUBSETS,
    ) -> dict[str, float]:
        """Compute those of the `EXTRA_METRICS` that `names` has, and `kid_std` beside `kid`.

        Args:
            generated: statistics of the generated images, with their features.
            names: names of metrics; others are ignored.
            kid_subsets: number of KID's subsets.
        """
        features, real = generated.features, self.real.features
        if features is None or real is None:
            return {}

        values: dict[str, float] = {}
        if "kid" in names:
            # A half of the samples, which give standard errors, may be smaller than the subsets.
            size = min(self.options.kid_subset_size, len(features))
            values |= kernel_distance(features, real, size, kid_subsets)

        if "precision" in names or "recall" in names:
            k = self.options.pr_k
            values |= precision_recall(features, real, k, self.real_radii(k))

        if "density" in names or "coverage" in names:
            k = self.options.dc_k
            values |= density_and_coverage(features, real, k, self.real_radii(k))

        # Precision comes with recall, and density with coverage.
        return {name: value for name, value in values.items() if name in (*names, "kid_std")}

    def real_radii(self, k: int) -> Tensor | None:
        """Return `neighbour_radii` of the real images, computed once; None if they are too few."""
        features = self.real.features
        if features is None or not 1 <= k < len(features):
            return None
        if k not in self._radii:
            self._radii[k] = neighbour_radii(features, k)
        return self._radii[k]


def score_of_logits(generated: FeatureStatistics) -> dict[str, float]:
    """Return the Inception Score and its deviation over splits, or nothing without logits."""
    return {} if generated.logits is None else inception_score(generated.logits)


def images_needed(name: str, options: ComparisonOptions) -> int:
    """Return the least number of images of each kind that a metric can be computed from."""
    if name == "inception_score":
        return INCEPTION_SCORE_SPLITS
    if name == "kid":
        return options.kid_subset_size
    if name in ("precision", "recall"):
        return options.pr_k + 1
    if name in ("density", "coverage"):
        return options.dc_k + 1
    return 2


def refuse_too_few(
    names: Collection[str], options: ComparisonOptions, generated: int, real: int
) -> None:
    """Raise InputError if there are fewer images than a metric needs.

    Args:
        names: names of metrics.
        options: options of the metrics.
        generated: number of generated images.
        real: number of real images.
    """
    for name in names:
        # The Inception Score compares with no image.
        count = generated if name == "inception_score" else min(generated, real)
        least = images_needed(name, options)
        if count < least:
            about = f" with kid_subset_size={options.kid_subset_size}" if name == "kid" else ""
            needs = f"at least {least} images are needed, there are {count}"
            if name == "kid":
                needs += "; a smaller kid_subset_size needs fewer"
            raise InputError(f"{name}{about}: {needs}")
