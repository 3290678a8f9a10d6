"""Scores any samples against any data, for `lit_knn.metrics.score` and the command `lit-knn score`."""

import warnings

from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.pixels import are_pictures
from lit_knn.common.tables import Row
from lit_knn.data.image_stream import ImageStream
from lit_knn.metrics.copy_scores import copy_rows
from lit_knn.metrics.feature_scores import FeatureScores
from lit_knn.metrics.memorisation import check_search
from lit_knn.metrics.score_data import ScoreData, size_of
from lit_knn.metrics.score_features import ChosenFeatures
from lit_knn.metrics.score_options import (
    ScoreOptions,
    default_metrics,
    refuse_without_images,
)


class Scorer:
    """Compares sets of samples with the same data, whose features are computed once.

    Args:
        data: what samples are compared with: images, statistics, or both.
        metrics: names from `METRICS`; None for those that need no choice.
        options: options of `score`.
        shape: shape of a sample.
    """

    def __init__(
        self,
        data: ScoreData,
        metrics: list[str] | None,
        options: ScoreOptions,
        shape: tuple[int, ...],
    ) -> None:
        if data.images is None and not data.statistics:
            raise InputError("score: there is nothing to compare with; give images or statistics")

        has_images = data.images is not None
        self.metrics = metrics or default_metrics(are_pictures(shape), has_images)
        if not has_images:
            refuse_without_images(self.metrics)
        if "memorisation" in self.metrics:
            assert data.images is not None
            check_search(data.images)
            if data.held_out is None:
                advice = "with --data.held_out, a number of them, it is measured"
                warnings.warn(
                    f"c_t: left out, because no images are held out; {advice}", stacklevel=2
                )

        self.data = data
        self.shape = shape
        self.options = options
        chosen = ChosenFeatures(self.metrics, options, shape)
        self.parts = []
        for extractor, names in chosen.values.items():
            self.parts.append(FeatureScores(extractor, names, data, options))
        self._check_statistics()
        # The likest pairs of the samples that were measured last, and of their nearest images.
        self.pairs: tuple[Tensor, Tensor] | None = None

    def _check_statistics(self) -> None:
        """Raise InputError if published statistics are those of no features that are measured."""
        fitting: set[str] = set()
        features = []
        for part in self.parts:
            fitting.update(part.fitting_statistics)
            features.append(f"{part.extractor.metric} {part.extractor.num_features:,}")

        for name, statistics in self.data.statistics.items():
            if name not in fitting:
                problem = f"{name} has statistics of {len(statistics.mean):,} features"
                advice = "published ones of 2,048 need fid, with Inception's weights"
                raise InputError(f"{problem}, but here are {', '.join(features)}: {advice}")

        for part in self.parts:
            if not part.has_reference:
                rule = "there is nothing to compare with"
                advice = "give the images, too: --data …"
                raise InputError(f"{part.extractor.metric}: {rule}; {advice}")

    def check(self, samples: ImageStream) -> None:
        """Raise InputError if samples cannot be compared with the data."""
        self.data.check_shapes(samples)
        if samples.shape != self.shape:
            sizes = f"{samples.name} has {size_of(samples.shape)}"
            sizes += f", but the first samples have {size_of(self.shape)}"
            raise InputError(f"{sizes}: score them one after the other")
        for part in self.parts:
            part.check(samples)

    def rows(self, samples: ImageStream) -> list[Row]:
        """Measure samples, after `check`, and return a row for each value."""
        rows: list[Row] = []
        for part in self.parts:
            rows += part.rows(samples)

        self.pairs = None
        if "memorisation" in self.metrics and self.data.images is not None:
            copies, self.pairs = copy_rows(samples, self.data, self.data.images, self.options)
            rows += copies
        return rows
