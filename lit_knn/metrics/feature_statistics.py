"""Statistics of the features of images, summed over batches and ranks."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lit_knn.common.distributed import rank_and_size, warn_on_first_rank
from lit_knn.common.progress import progress_bar
from lit_knn.metrics.features import FeatureExtractor
from lit_knn.reference import ReferenceSet

# No samples of half-trained models and no toys reach this size, where images end at 1; pixels from -127 to 128 do.
OVERSHOOT = 16.0


class FeatureStatistics:
    """Statistics of F features of a set of images: mean (F,) and unbiased covariance (F, F), both float64, and count.

    `features` (count, F) and `logits` (count, L), float32, are in the order of the images' numbers, or None.
    """

    # A data class or tuple would not work: torchmetrics would look into it and squeeze the mean of a single feature.
    def __init__(
        self,
        mean: Tensor,
        cov: Tensor,
        count: int,
        features: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> None:
        self.mean, self.cov, self.count = mean, cov, count
        self.features, self.logits = features, logits

    def to(self, device: torch.device | str) -> "FeatureStatistics":
        """Return a copy on another device, without logits."""
        features = None if self.features is None else self.features.to(device)
        return FeatureStatistics(self.mean.to(device), self.cov.to(device), self.count, features)

    def of_rows(self, rows: Tensor) -> "FeatureStatistics":
        """Return the statistics of some of the images, (n,) int64; `features` must be known."""
        assert self.features is not None
        features = self.features[rows.to(self.features.device)]
        doubles = features.double()
        logits = None if self.logits is None else self.logits[rows.to(self.logits.device)]
        return FeatureStatistics(
            doubles.mean(0), torch.atleast_2d(torch.cov(doubles.T)), len(rows), features, logits
        )


class FeatureSums(Metric):
    """Adds up F features over batches and ranks; `compute` gives their `FeatureStatistics`, the same on every rank.

    Sums and outer products are float64, so that the order of the images makes no difference. The L logits
    are gathered and sorted by the images' numbers, and with `keep_features` also the features.
    """

    feature_sum: Tensor
    outer_sum: Tensor
    count: Tensor
    numbers: list[Tensor]
    features: list[Tensor]
    logits: list[Tensor]

    def __init__(self, num_features: int, num_logits: int = 0, keep_features: bool = False) -> None:
        super().__init__()
        self.num_logits, self.keep_features = num_logits, keep_features
        self.add_state(
            "feature_sum", torch.zeros(num_features, dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state(
            "outer_sum",
            torch.zeros(num_features, num_features, dtype=torch.float64),
            dist_reduce_fx="sum",
        )
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("numbers", "features", "logits"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, numbers: Tensor, features: Tensor, logits: Tensor | None = None) -> None:
        """Add a batch, which may be empty (each rank needs at least one batch).

        Args:
            numbers: (B,), int64, a different one for each image, such as its seed.
            features: (B, F).
            logits: (B, L), if any.
        """
        doubles = features.double()
        self.feature_sum += doubles.sum(0)
        self.outer_sum += doubles.T @ doubles
        self.count += len(features)
        self.numbers.append(numbers.to(features.device))
        if self.keep_features:
            self.features.append(features)
        if self.num_logits and logits is not None:
            self.logits.append(logits)

    def compute(self) -> FeatureStatistics:
        """Return the statistics of all images so far."""
        order = dim_zero_cat(self.numbers).argsort()
        count = int(self.count)
        mean = self.feature_sum / count
        cov = (self.outer_sum - count * torch.outer(mean, mean)) / (count - 1)
        features = dim_zero_cat(self.features)[order] if self.keep_features else None
        logits = dim_zero_cat(self.logits)[order] if self.num_logits else None
        return FeatureStatistics(mean, cov, count, features, logits)


def feature_statistics(
    batches: Iterable[tuple[Tensor, Tensor]],
    extractor: FeatureExtractor,
    device: torch.device | str,
    keep_features: bool = False,
    keep_logits: bool = False,
    advance: Callable[[int], object] = lambda images: None,
) -> FeatureStatistics:
    """Compute statistics of images that come in batches; all ranks must call it, each with its share.

    Args:
        batches: numbers (B,) int64, each used once over all ranks, and images (B, *shape) in model space.
        extractor: loaded on `device`.
        device: where features are computed.
        keep_features: also return the features of each image.
        keep_logits: also return the logits of each image.
        advance: called with the number of images after each batch.
    """
    num_logits = extractor.num_logits if keep_logits else 0
    sums = FeatureSums(extractor.num_features, num_logits, keep_features).to(device)
    # A rank without images still takes part in the sums.
    nothing = torch.zeros(0, extractor.num_features, device=device)
    sums.update(torch.zeros(0, dtype=torch.int64), nothing, nothing.new_zeros(0, num_logits))
    for numbers, images in batches:
        images = images.to(device)
        features, logits = extractor(images)
        # In the picture that the network gets, a pixel that is not finite would be black, and nobody would notice.
        features = features.where(images.flatten(1).isfinite().all(1, keepdim=True), torch.nan)
        sums.update(numbers, features, logits if num_logits else None)
        advance(len(images))
    return sums.compute()


def doubt_about(images: Tensor) -> str:
    """Return why float images, (N, 1 or 3, H, W), may not be in model space; "" for others.

    Without a negative value they are probably in [0, 1] or [0, 255], and a network would see other pictures. Samples of
    a model may leave [-1, 1].
    """
    is_picture = images.ndim == 4 and images.shape[1] in (1, 3)
    if not is_picture or images.dtype == torch.uint8:
        return ""
    low, high = torch.stack(images.aminmax()).tolist()
    if -OVERSHOOT <= low < 0 and high <= OVERSHOOT:
        return ""
    return f"float images with values from {low:g} to {high:g}; floats are never rescaled"


def set_of_images(images: Tensor | np.ndarray | ReferenceSet) -> ReferenceSet:
    """Return images as a set, with a warning if a tensor or array may not be in model space; a set stays as it is."""
    if isinstance(images, ReferenceSet):
        return images

    reference = ReferenceSet(images)
    doubt = doubt_about(reference.images)
    if doubt:
        warn_on_first_rank(f"{doubt}: give uint8, or floats in [-1, 1]")
    return reference


def image_statistics(
    images: Tensor | np.ndarray | ReferenceSet, extractor: FeatureExtractor, batch_size: int = 128
) -> FeatureStatistics:
    """Compute statistics of images on their device.

    Args:
        images: (N, *shape), uint8 pixels or float in model space. The mirror images of a reference
            set are left out, as in published values.
        extractor: computes the features.
        batch_size: images at a time.
    """
    reference = set_of_images(images)
    extractor.load(reference.shape, reference.device)
    share = reference.share(*rank_and_size(), batch_size, mirrored=False)
    with progress_bar(len(reference.images), "Features", " images") as bar:
        return feature_statistics(share, extractor, reference.device, advance=bar.update)
