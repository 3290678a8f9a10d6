"""Measures the fidelity of any images to a data set, for the `Fidelity` callback."""

import hashlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from lit_knn.common.distributed import broadcast, on_first_rank, rank_and_size, warn_on_first_rank
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.progress import Bar, progress_bar
from lit_knn.common.tables import HELD_OUT
from lit_knn.metrics.features import FeatureExtractor, InceptionV3
from lit_knn.metrics.fidelity import (
    INCEPTION_SCORE_SPLITS,
    FeatureStatistics,
    feature_statistics,
    frechet_distance_of_statistics,
    inception_score,
    kernel_distance,
    precision_recall,
)
from lit_knn.metrics.kept_results import load_tensors, save_tensors
from lit_knn.reference import ReferenceSet

EXTRA_METRICS = ("kid", "precision", "recall")


class FidelityMeasure:
    """Compares images with a reference set; all ranks take part and get the same numbers.

    The real images are those of the reference set. The options are those of the callback `Fidelity`; here `held_out`
    only adds `_held_out` to the names of values, so that they cannot be taken for distances to the training images.
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
        unknown = [name for name in extra_metrics if name not in EXTRA_METRICS]
        if unknown:
            raise InputError(
                f"extra_metrics: unknown metric {unknown[0]!r}; there are {', '.join(EXTRA_METRICS)}"
            )
        check_at_least(1, batch_size=batch_size)
        check_at_least(2, kid_subset_size=kid_subset_size)
        self.extractor, self.batch_size = (
            InceptionV3() if extractor is None else extractor,
            batch_size,
        )
        self.extra_metrics, self.kid_subset_size = tuple(extra_metrics), kid_subset_size
        self.cache_dir, self.mirrored = cache_dir, mirrored
        self.suffix = HELD_OUT if held_out else ""
        self._of: ReferenceSet | None = None
        self._real: FeatureStatistics | None = None

    @property
    def metric(self) -> str:
        """Name of the distance: the extractor's, and `_held_out` for held-out images."""
        return self.extractor.metric + self.suffix

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all values that a call returns."""
        scores = ("inception_score", "inception_score_std") if self.extractor.num_logits else ()
        extra = (n for m in self.extra_metrics for n in ((m, "kid_std") if m == "kid" else (m,)))
        return self.metric, *scores, *(n + self.suffix for n in extra)

    def prepare(self, reference: ReferenceSet, num_images: int) -> None:
        """Load the extractor and check that `num_images` images can be compared with the data, before any long work."""
        # The first rank downloads missing weights. If that fails, all ranks get its error.
        on_first_rank(lambda: self.extractor.load(reference.shape, "cpu"))
        self.extractor.load(reference.shape, "cpu")
        fewest, num_features = (
            min(num_images, self._num_real(reference)),
            self.extractor.num_features,
        )
        if fewest < 2:
            raise InputError(f"{self.metric} needs at least 2 images, there is {fewest}")
        if self.extractor.num_logits and num_images < INCEPTION_SCORE_SPLITS:
            raise InputError(
                f"inception_score: {num_images} images are fewer than its {INCEPTION_SCORE_SPLITS} splits"
            )
        if "kid" in self.extra_metrics and fewest < self.kid_subset_size:
            raise InputError(
                f"kid: kid_subset_size={self.kid_subset_size} is more than the {fewest} images"
            )
        if {"precision", "recall"} & set(self.extra_metrics) and fewest < 4:
            raise InputError(f"precision and recall need at least 4 images, there are {fewest}")
        if fewest <= num_features:
            told = f"{fewest} images give a rank-deficient covariance of {num_features} features"
            warn_on_first_rank(
                f"{self.metric}: {told}; compare it only between equal numbers of images"
            )
        if isinstance(self.extractor, InceptionV3) and not self.extractor.is_published:
            told = f"fid: weights={self.extractor.weights} are not the published ones"
            warn_on_first_rank(
                f"{told}, so neither are FID and Inception Score comparable with published values"
            )

    def _num_real(self, reference: ReferenceSet) -> int:
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

        `batches` are this rank's share of the images, as in `feature_statistics`, read one at a time under a progress
        bar that `bar` makes. `total` is the number of images over all ranks, None if the caller shows a bar. The result
        has the distance under the name `metric`, the Inception Score and the extra metrics.
        """
        self.extractor.load(reference.shape, device)
        if self._of is not reference:
            self._real = self._real_statistics(reference, device, bar)
            self._of = reference
        own_share = None if total is None else total // rank_and_size()[1]
        generated = self._statistics(
            batches, device, bar(own_share, "Samples", " images"), with_logits=True
        )
        return on_first_rank(lambda: self._values(generated))

    def _values(self, generated: FeatureStatistics) -> dict[str, float]:
        real = self._real
        assert real is not None
        values = {self.metric: frechet_distance_of_statistics(generated, real)}
        if generated.logits is not None:
            values |= inception_score(generated.logits)
        extra: dict[str, float] = {}
        if generated.features is not None and real.features is not None:
            if "kid" in self.extra_metrics:
                extra |= kernel_distance(generated.features, real.features, self.kid_subset_size)
            if {"precision", "recall"} & set(self.extra_metrics):
                shares = precision_recall(generated.features, real.features)
                extra |= {
                    name: value for name, value in shares.items() if name in self.extra_metrics
                }
        return values | {name + self.suffix: value for name, value in extra.items()}

    def _real_statistics(
        self, reference: ReferenceSet, device: torch.device | str, bar: Bar
    ) -> FeatureStatistics | None:
        """Load the statistics of the data, or compute them on all ranks. Only the first rank needs the result."""
        rank, size = rank_and_size()
        path = None
        if self.cache_dir is not None:
            # All ranks must call it, because ranks may share the images.
            data = reference.fingerprint(self.mirrored)
            extractor = self.extractor.fingerprint()
            identity = f"{data} {extractor} features={bool(self.extra_metrics)}".encode()
            name = f"{self.extractor.metric}-{hashlib.sha256(identity).hexdigest()[:16]}.npz"
            path = Path(self.cache_dir, name).expanduser()
            kept = load_tensors(path) if rank == 0 else {}
            if broadcast(bool(kept)):
                parts = kept and (
                    kept["mean"],
                    kept["cov"],
                    int(kept["count"]),
                    kept.get("features"),
                )
                return FeatureStatistics(*parts).to(device) if parts else None
            # A bad folder raises its error before the pass over the data.
            on_first_rank(partial(path.parent.mkdir, parents=True, exist_ok=True))
        # Only samples have an Inception Score; the logits of a large data set would fill the memory.
        batches = reference.share(rank, size, self.batch_size, self.mirrored)
        shown = bar(self._num_real(reference) // size, "Data", " images")
        real = self._statistics(batches, device, shown, with_logits=False)
        if path is not None and rank == 0:
            try:
                save_tensors(path, **{**vars(real), "count": torch.tensor(real.count)})
                print(
                    f"Statistics of the data ({self.extractor.metric}) are kept in {path}",
                    file=sys.stderr,
                )
            except OSError as error:
                warnings.warn(
                    f"{path} cannot be written: {error.strerror}; going on without", stacklevel=2
                )
        return real

    def _statistics(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        device: torch.device | str,
        bar: tqdm,
        with_logits: bool,
    ) -> FeatureStatistics:
        with bar:
            keep = bool(self.extra_metrics)
            return feature_statistics(
                batches, self.extractor, device, keep, with_logits, bar.update
            )
