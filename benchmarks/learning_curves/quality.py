"""Compares samples with real images, and looks for copies of the images that the run was trained on."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.learning_curves.sets import Images
from lit_knn.common.files import written_whole
from lit_knn.metrics import FeatureExtractor
from lit_knn.metrics.feature_statistics import FeatureStatistics
from lit_knn.metrics.fidelity import frechet_distance_of_statistics
from lit_knn.metrics.memorisation import memorisation
from lit_knn.metrics.sample_quality import precision_recall
from lit_knn.reference import ReferenceSet

# Real images whose features are compared. All images would take 20 minutes.
REAL_FEATURES = 10_000


class Quality:
    """Measures samples of a set.

    Args:
        images: the images of the set.
        extractor: features besides pixels; None leaves what is measured in features NaN.
        kept: .npy file of the features of the real images, which is made if it is not there.
    """

    def __init__(self, images: Images, extractor: FeatureExtractor | None, kept: Path) -> None:
        self.training, self.extractor = images.training, extractor
        self.real_pixels = statistics(_first(images.real, images.real.N).flatten(1))
        if extractor is None:
            return
        extractor.load(images.training.shape, "cpu")
        if not kept.exists():
            with written_whole(kept) as partial, partial.open("wb") as file:
                np.save(file, self._features(_first(images.real, REAL_FEATURES)).numpy())
        real = torch.from_numpy(np.load(kept))
        assert images.held_out is not None
        self.real_features, self.real_statistics = real, statistics(real)
        same = images.training.N == images.real.N
        self.training_features = (
            real if same else self._features(_first(images.training, REAL_FEATURES))
        )
        # New images of the same kind have this distance to the training images.
        self.nearest_of_new = self._nearest(self._features(_first(images.held_out, 1_000)))

    def measure(self, samples: Tensor) -> dict[str, float]:
        """Measure samples (B, *shape) in model space.

        Returns:
            `fd_pixels`, `fd_features`: Fréchet distances to the real images; `precision`, `recall` of the features;
            `copied_fraction`; and `nearest_features`, the median distance of a sample to the nearest training image in
            features, as a share of that of a held-out image.
        """
        copied = memorisation(samples, self.training, batch_size=128)["copied_fraction"]
        row = {"fd_pixels": self.fd_pixels(samples), "copied_fraction": copied}
        if self.extractor is None:
            return row | dict.fromkeys(
                ("fd_features", "precision", "recall", "nearest_features"), math.nan
            )
        features = self._features(samples)
        row["fd_features"] = frechet_distance_of_statistics(
            statistics(features), self.real_statistics
        )
        row |= precision_recall(features, self.real_features[: len(features)])
        return row | {"nearest_features": self._nearest(features) / self.nearest_of_new}

    def fd_pixels(self, samples: Tensor) -> float:
        """Compute the Fréchet distance on pixels."""
        return frechet_distance_of_statistics(statistics(samples.flatten(1)), self.real_pixels)

    def _features(self, images: Tensor) -> Tensor:
        assert self.extractor is not None
        return self.extractor(images)[0]

    def _nearest(self, features: Tensor) -> float:
        return torch.cdist(features, self.training_features).amin(1).median().item()


def statistics(features: Tensor) -> FeatureStatistics:
    """Return mean and covariance of features (N, F)."""
    doubles = features.double()
    return FeatureStatistics(doubles.mean(0), doubles.T.cov(), len(features))


def _first(images: ReferenceSet, number: int) -> Tensor:
    return images.gather(torch.arange(min(number, images.N)))
