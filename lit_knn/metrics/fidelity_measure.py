"""Measures the fidelity of any images to a data set, for the `Fidelity` callback."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lit_knn.common.distributed import on_first_rank, rank_and_size, warn_on_first_rank
from lit_knn.common.errors import InputError
from lit_knn.common.progress import Bar, progress_bar
from lit_knn.common.tables import HELD_OUT
from lit_knn.metrics.feature_networks import InceptionV3
from lit_knn.metrics.feature_statistics import FeatureStatistics, feature_statistics
from lit_knn.metrics.features import FeatureExtractor
from lit_knn.metrics.fidelity import (
    EXTRA_METRICS,
    INCEPTION_SCORE_SPLITS,
    extra_values,
    frechet_distance_of_statistics,
    inception_score,
)
from lit_knn.metrics.kept_statistics import kept_or_computed, statistics_path
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

        self.extractor = InceptionV3() if extractor is None else extractor
        self.batch_size = batch_size
        self.extra_metrics = tuple(extra_metrics)
        self.kid_subset_size = kid_subset_size
        self.cache_dir = cache_dir
        self.mirrored = mirrored
        self.suffix = HELD_OUT if held_out else ""
        # The data of the last call, and their statistics.
        self._measured_data: ReferenceSet | None = None
        self._real: FeatureStatistics | None = None

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
        fewest = min(num_images, self._num_real(reference))
        self._refuse_too_few(num_images, fewest)

        num_features = self.extractor.num_features
        if fewest <= num_features:
            reason = f"{fewest} images give a rank-deficient covariance of {num_features} features"
            advice = "compare it only between equal numbers of images"
            warn_on_first_rank(f"{self.metric}: {reason}; {advice}")

        if isinstance(self.extractor, InceptionV3) and not self.extractor.is_published:
            reason = f"weights={self.extractor.weights} are not the published ones"
            effect = "neither are FID and Inception Score comparable with published values"
            warn_on_first_rank(f"fid: {reason}, so {effect}")

    def _refuse_too_few(self, num_images: int, fewest: int) -> None:
        """Refuse fewer images than a metric needs.

        Args:
            num_images: number of images that are compared with the data.
            fewest: the smaller one of this number and the number of real images.
        """
        needs = [(self.metric, 2, fewest)]  # name, least number of images, and number that there is
        if self.extractor.num_logits:
            needs.append(("inception_score", INCEPTION_SCORE_SPLITS, num_images))
        if "kid" in self.extra_metrics:
            needs.append(
                (f"kid with kid_subset_size={self.kid_subset_size}", self.kid_subset_size, fewest)
            )
        if {"precision", "recall"} & set(self.extra_metrics):
            needs.append(("precision and recall", 4, fewest))  # for three neighbours of each

        for name, least, count in needs:
            if count < least:
                raise InputError(f"{name}: at least {least} images are needed, there are {count}")

    def _num_real(self, reference: ReferenceSet) -> int:
        """Return the number of real images that are compared."""
        return reference.N // 2 if reference.hflip and not self.mirrored else reference.N

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
            self._real = self._real_statistics(reference, device, bar)
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
        real = self._real
        assert real is not None
        values = {self.metric: frechet_distance_of_statistics(generated, real)}
        if generated.logits is not None:
            values |= inception_score(generated.logits)
        if generated.features is None or real.features is None:
            return values

        features = generated.features, real.features
        extra = extra_values(self.extra_metrics, *features, self.kid_subset_size)
        for name, value in extra.items():
            values[name + self.suffix] = value
        return values

    def _real_statistics(
        self, reference: ReferenceSet, device: torch.device | str, bar: Bar
    ) -> FeatureStatistics | None:
        """Load the statistics of the data, or compute them on all ranks; only the first rank needs them."""
        rank, size = rank_and_size()
        keep = bool(self.extra_metrics)

        def compute() -> FeatureStatistics:
            batches = reference.share(rank, size, self.batch_size, self.mirrored)
            # Only samples have an Inception Score; the logits of a large data set would fill the memory.
            with bar(self._num_real(reference) // size, "Data", " images") as shown:
                return feature_statistics(
                    batches, self.extractor, device, keep, advance=shown.update
                )

        if self.cache_dir is None:
            return compute()
        # All ranks must call `fingerprint`, because each may have only a share of the images.
        data = reference.fingerprint(self.mirrored)
        path = statistics_path(self.cache_dir, data, self.extractor, keep)
        return kept_or_computed(path, compute, device, self.extractor.metric)
