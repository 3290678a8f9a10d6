"""The scores of samples by one kind of features: distances to data and to published statistics, and more."""

from collections.abc import Collection

from lit_knn.common.progress import progress_bar
from lit_knn.common.tables import Row
from lit_knn.data.image_stream import ImageStream, stream_of_set
from lit_knn.metrics.comparison import (
    EXTRA_METRICS,
    Comparison,
    images_needed,
    refuse_too_few,
    score_of_logits,
)
from lit_knn.metrics.copy_scores import copy_tests, refuse_few_held_out
from lit_knn.metrics.data_statistics import DataStatistics, num_compared, warn_of_limits
from lit_knn.metrics.feature_networks import NetworkExtractor
from lit_knn.metrics.feature_statistics import FeatureStatistics, feature_statistics
from lit_knn.metrics.features import FeatureExtractor
from lit_knn.metrics.fidelity import KID_SUBSETS
from lit_knn.metrics.half_splits import half_split_errors
from lit_knn.metrics.score_data import ScoreData
from lit_knn.metrics.score_features import DISTANCE, name_of
from lit_knn.metrics.score_options import COPY_TESTS, ScoreOptions
from lit_knn.metrics.score_table import RowMaker

INCEPTION_SCORE = "inception_score"
# All KIDs of four splits then take twice the time of the value itself.
KID_SUBSETS_OF_HALF = 25
# The name of a metric, and of what samples are compared with.
Key = tuple[str, str]


class FeatureScores:
    """Scores samples by one kind of features.

    Args:
        extractor: computes the features; loaded.
        names: the values to measure: "distance", "inception_score", `EXTRA_METRICS` and `COPY_TESTS`.
        data: what samples are compared with.
        options: options of `score`.
    """

    def __init__(
        self,
        extractor: FeatureExtractor,
        names: Collection[str],
        data: ScoreData,
        options: ScoreOptions,
    ) -> None:
        self.extractor = extractor
        self.names = names
        self.data = data
        self.options = options
        self._of_statistics: dict[str, Comparison] = {}
        # Single images are compared with the data's alone.
        self._of_images: Comparison | None = None
        self._held_out: FeatureStatistics | None = None

    @property
    def fitting_statistics(self) -> dict[str, FeatureStatistics]:
        """The published statistics that may be of these features: those of as many features."""
        number = self.extractor.num_features
        known = self.data.statistics
        return {name: part for name, part in known.items() if len(part.mean) == number}

    @property
    def has_reference(self) -> bool:
        """Whether there is something to measure each distance to."""
        has_any = self.data.images is not None or bool(self.fitting_statistics)
        return has_any or DISTANCE not in self.names

    def check(self, samples: ImageStream) -> None:
        """Raise InputError if there are too few images, before any long work; warn of what limits comparisons."""
        num_real = samples.count
        if self.data.images is not None:
            num_real = num_compared(self.data.images)
        names = []
        for name in self.names:
            names.append(self.extractor.metric if name == DISTANCE else name)
        refuse_too_few(names, self.options.comparison, samples.count, num_real)

        if "c_t" in self.names and self.data.held_out is not None:
            refuse_few_held_out(samples.count, len(self.data.held_out.images))
        if DISTANCE in self.names:
            fewest = min(samples.count, num_real)
            warn_of_limits(self.extractor, self.extractor.metric, fewest)

    def rows(self, samples: ImageStream) -> list[Row]:
        """Measure samples, and return a row for each value."""
        self._prepare()
        generated = self._statistics_of(samples)
        values = self._values(generated, self.names)

        errors: dict[Key, float] = {}
        in_halves = self._names_in_halves(samples.count // 2)
        if self.options.splits and in_halves:

            def values_of_half(half: FeatureStatistics) -> dict[Key, float]:
                return self._values(half, in_halves, KID_SUBSETS_OF_HALF)

            splits, seed = self.options.splits, self.options.seed
            errors = half_split_errors(values_of_half, generated, splits, seed)

        as_bytes = isinstance(self.extractor, NetworkExtractor)
        make = RowMaker(samples, self.data, name_of(self.extractor), as_bytes, self.options)
        rows = [make(*key, value, errors.get(key)) for key, value in values.items()]
        if self._of_images is not None and "auth_pct" in self.names:
            tests = copy_tests(generated, self._of_images, self._held_out)
            for name, (value, error) in tests.items():
                rows.append(make(name, self.data.name, value, error))
        return rows

    def _prepare(self) -> None:
        """Compute the features of the data, the first time."""
        images, options = self.data.images, self.options
        if not self._of_statistics:
            for name, known in self.fitting_statistics.items():
                of_known = Comparison(known.to(options.device), options.comparison)
                self._of_statistics[name] = of_known

        if images is None or self._of_images is not None or self.names == [INCEPTION_SCORE]:
            return

        statistics = DataStatistics(self.extractor, options.batch_size, options.cache_dir)
        real = statistics.of(images, self._compares_single_images(), options.device)
        assert real is not None  # There is one rank.
        self._of_images = Comparison(real, options.comparison)
        if self.data.held_out is not None and "c_t" in self.names:
            self._held_out = self._statistics_of(stream_of_set(self.data.held_out, "held out"))

    def _compares_single_images(self) -> bool:
        """Return whether a metric compares single images."""
        return any(name in self.names for name in (*EXTRA_METRICS, *COPY_TESTS))

    def _statistics_of(self, images: ImageStream) -> FeatureStatistics:
        """Compute the statistics of images, with the features of each where they are needed."""
        keep = self._compares_single_images() or self.options.splits > 0
        with progress_bar(images.count, name_of(self.extractor), " images") as bar:
            return feature_statistics(
                images.numbered_batches(self.options.batch_size),
                self.extractor,
                self.options.device,
                keep,
                keep_logits=INCEPTION_SCORE in self.names,
                advance=bar.update,
            )

    def _values(
        self,
        generated: FeatureStatistics,
        names: Collection[str],
        kid_subsets: int = KID_SUBSETS,
    ) -> dict[Key, float]:
        """Compute values of all samples or of a half.

        Args:
            generated: statistics of the samples.
            names: the values to compute. `COPY_TESTS` are ignored.
            kid_subsets: number of KID's subsets.
        """
        values: dict[Key, float] = {}
        comparison = self._of_images
        if DISTANCE in names:
            metric = self.extractor.metric
            if comparison is not None:
                values[metric, self.data.name] = comparison.distance(generated)
            for name, of_statistics in self._of_statistics.items():
                values[metric, name] = of_statistics.distance(generated)

        if INCEPTION_SCORE in names:
            values[INCEPTION_SCORE, ""] = score_of_logits(generated)[INCEPTION_SCORE]

        if comparison is not None:
            for name, value in comparison.values(generated, names, kid_subsets).items():
                if name in names:  # and not the deviation of KID over its subsets
                    values[name, self.data.name] = value
        return values

    def _names_in_halves(self, count: int) -> list[str]:
        """Return the values that can be computed from halves of `count` samples."""
        names = []
        for name in self.names:
            # KID takes smaller subsets of halves.
            least = 2 if name == "kid" else images_needed(name, self.options.comparison)
            if name not in COPY_TESTS and least <= count:
                names.append(name)
        return names
