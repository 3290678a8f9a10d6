"""Metrics of estimators and of generated samples."""

from lit_knn.metrics.features import DINOv2, EfficientNetLite0, FeatureExtractor, InceptionV3, Pixels
from lit_knn.metrics.fidelity import (
    FeatureStatistics,
    FeatureSums,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
)

__all__ = [
    "DINOv2",
    "EfficientNetLite0",
    "FeatureExtractor",
    "FeatureStatistics",
    "FeatureSums",
    "InceptionV3",
    "Pixels",
    "frechet_distance",
    "inception_score",
    "kernel_distance",
    "precision_recall",
]
