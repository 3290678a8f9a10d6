"""Measures the fidelity of any images to a data set, for the `Fidelity` callback."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lit_knn.common.distributed import on_first_rank, rank_and_size
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.progress import Bar, progress_bar
from lit_knn.common.tables import HELD_OUT
from lit_knn.metrics.comparison import (
    EXTRA_METRICS,
    Comparison,
    ComparisonOptions,
    refuse_too_few,
    score_of_logits,
)
from lit_knn.metrics.data_statistics import DataStatistics, num_compared, warn_of_limits
from lit_knn.metrics.feature_networks import InceptionV3
from lit_knn.metrics.feature_statistics import FeatureStatistics, feature_statistics
from lit_knn.metrics.features import FeatureExtractor
from lit_knn.reference import ReferenceSet


class FidelityMeasure:
    """Compares images with a reference set; all ranks take part and get the same numbers.

    The real images are those of the reference set. The callback `Fidelity` explains the options.

    Args:
        extractor: computes the features; by default `InceptionV3`.
        batch_size: images at a time.
        extra_metrics: names from `EXTRA_METRICS`.
        kid_subset_size: images of one subset of KID.
        cache_dir: folder of the statistics of data.
        mirrored: count the mirror images of the data as real ones.
        held_out: add `_held_out` to the names of values, so that they cannot be taken for distances
            to the training images.
    """

    def __init__(
        self,
        extractor: FeatureExtractor | None = None,
        batch_size: int = 128,
        extra_metrics: Sequence[str] = (),
        kid_subset_size: int = 1000,
        cache_dir: str | None = None,
        mirrored: bool = False,
        held_out: bool = False,
    ) -> None:
        for name in extra_metrics:
            if name not in EXTRA_METRICS:
                known = ", ".join(EXTRA_METRICS)
                raise InputError(f"extra_metrics: unknown metric {name!r}; there are {known}")

        check_at_least(1, batch_size=batch_size)
        self.extractor = InceptionV3() if extractor is None else extractor
        self.batch_size = batch_size
        self.extra_metrics = tuple(extra_metrics)
        self.kid_subset_size = kid_subset_size
        self.mirrored = mirrored
        self.options = ComparisonOptions(kid_subset_size)
        self._statistics = DataStatistics(self.extractor, batch_size, cache_dir, mirrored)
        self.suffix = HELD_OUT if held_out else ""
        # The data of the last call, and what compares images with them.
        self._measured_data: ReferenceSet | None = None
        self._comparison: Comparison | None = None

    @property
    def metric(self) -> str:
        """Name of the distance: the extractor's, and `_held_out` for held-out images."""
        return self.extractor.metric + self.suffix

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all values that a call returns."""
        names = [self.metric]
        if self.extractor.num_logits:
            names += ["inception_score", "inception_score_std"]

        for metric in self.extra_metrics:
            names.append(metric + self.suffix)
            if metric == "kid":
                names.append("kid_std" + self.suffix)
        return tuple(names)

    def prepare(self, reference: ReferenceSet, num_images: int) -> None:
        """Load the extractor and check that `num_images` images can be compared with the data, before any long work."""
        # The first rank downloads missing weights. If that fails, all ranks get its error.
        on_first_rank(lambda: self.extractor.load(reference.shape, "cpu"))
        self.extractor.load(reference.shape, "cpu")
        num_real = num_compared(reference, self.mirrored)

        names = [self.metric, *self.extra_metrics]
        if self.extractor.num_logits:
            names.append("inception_score")
        refuse_too_few(names, self.options, num_images, num_real)

        fewest = min(num_images, num_real)
        warn_of_limits(self.extractor, self.metric, fewest)

    def __call__(
        self,
        reference: ReferenceSet,
        batches: Iterable[tuple[Tensor, Tensor]],
        total: int | None,
        device: torch.device | str = "cpu",
        bar: Bar = progress_bar,
    ) -> dict[str, float]:
        """Compare images with the data; all ranks call it, after `prepare`.

        Args:
            reference: the data.
            batches: this rank's share of the images, as in `feature_statistics`, read one at a time.
            total: number of images over all ranks; None if the caller shows a bar.
            device: where features are computed.
            bar: makes the progress bars.

        Returns:
            The distance under the name `metric`, the Inception Score and the extra metrics.
        """
        self.extractor.load(reference.shape, device)
        if self._measured_data is not reference:
            keep = bool(self.extra_metrics)
            real = self._statistics.of(reference, keep, device, bar)
            # Only the first rank needs the statistics of the data.
            self._comparison = None if real is None else Comparison(real, self.options)
            self._measured_data = reference

        share = None if total is None else total // rank_and_size()[1]
        with bar(share, "Samples", " images") as shown:
            # Metrics that compare single images need their features.
            keep = bool(self.extra_metrics)
            generated = feature_statistics(
                batches, self.extractor, device, keep, keep_logits=True, advance=shown.update
            )
        return on_first_rank(lambda: self._values(generated))

    def _values(self, generated: FeatureStatistics) -> dict[str, float]:
        """Compute all values from the statistics. Only the first rank has those of the data."""
        comparison = self._comparison
        assert comparison is not None
        values = {self.metric: comparison.distance(generated)}
        values |= score_of_logits(generated)

        for name, value in comparison.values(generated, self.extra_metrics).items():
            values[name + self.suffix] = value
        return values
