"""Statistics of the features of a data set, kept in a file if wanted; and warnings about their limits."""

from dataclasses import dataclass

import torch

from lit_knn.common.distributed import rank_and_size, warn_on_first_rank
from lit_knn.common.progress import Bar, progress_bar
from lit_knn.metrics.feature_networks import InceptionV3
from lit_knn.metrics.feature_statistics import FeatureStatistics, feature_statistics
from lit_knn.metrics.features import FeatureExtractor
from lit_knn.metrics.kept_statistics import kept_or_computed, statistics_path
from lit_knn.reference import ReferenceSet


@dataclass(frozen=True)
class DataStatistics:
    """Computes the statistics of data sets by one extractor.

    Args:
        extractor: computes the features.
        batch_size: images at a time.
        cache_dir: folder of the files of statistics; None to keep none.
        mirrored: count the mirror images of the data as real ones.
    """

    extractor: FeatureExtractor
    batch_size: int = 128
    cache_dir: str | None = None
    mirrored: bool = False

    def of(
        self,
        reference: ReferenceSet,
        keep_features: bool,
        device: torch.device | str,
        bar: Bar = progress_bar,
    ) -> FeatureStatistics | None:
        """Load the statistics of the data, or compute them on all ranks; only the first rank needs them.

        Args:
            reference: the data.
            keep_features: also return the features of each image.
            device: where features are computed; the extractor is loaded there.
            bar: makes the progress bar.
        """
        rank, size = rank_and_size()

        def compute() -> FeatureStatistics:
            batches = reference.share(rank, size, self.batch_size, self.mirrored)
            # Only samples have an Inception Score; the logits of a large data set would fill the memory.
            with bar(num_compared(reference, self.mirrored) // size, "Data", " images") as shown:
                return feature_statistics(
                    batches, self.extractor, device, keep_features, advance=shown.update
                )

        if self.cache_dir is None:
            return compute()
        # All ranks must call `fingerprint`, because each may have only a share of the images.
        data = reference.fingerprint(self.mirrored)
        path = statistics_path(self.cache_dir, data, self.extractor, keep_features)
        return kept_or_computed(path, compute, device, self.extractor.metric)


def num_compared(reference: ReferenceSet, mirrored: bool = False) -> int:
    """Return the number of real images that are compared."""
    return reference.N // 2 if reference.hflip and not mirrored else reference.N


def warn_of_limits(extractor: FeatureExtractor, metric: str, fewest: int) -> None:
    """Warn if a distance is comparable only with some other values.

    Args:
        extractor: loaded.
        metric: name of the distance.
        fewest: the smaller number of generated and real images.
    """
    num_features = extractor.num_features
    if fewest <= num_features:
        reason = f"{fewest} images give a rank-deficient covariance of {num_features} features"
        advice = "compare it only between equal numbers of images"
        warn_on_first_rank(f"{metric}: {reason}; {advice}")

    if isinstance(extractor, InceptionV3) and not extractor.is_published:
        reason = f"weights={extractor.weights} are not the published ones"
        effect = "neither are FID and Inception Score comparable with published values"
        warn_on_first_rank(f"fid: {reason}, so {effect}")
