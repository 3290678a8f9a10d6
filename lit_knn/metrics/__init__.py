"""Metrics of estimators and of generated samples. The modules hold more than these names."""

from lit_knn.metrics.dinov2 import DINOv2
from lit_knn.metrics.error_curve import ErrorCurve, error_curve
from lit_knn.metrics.feature_networks import EfficientNetLite0, InceptionV3
from lit_knn.metrics.features import FeatureExtractor, Pixels
from lit_knn.metrics.fidelity import frechet_distance
from lit_knn.metrics.fidelity_measure import FidelityMeasure
from lit_knn.metrics.memorisation import is_copied, memorisation, nearest_images
from lit_knn.metrics.score_options import ScoreOptions
from lit_knn.metrics.scoring import score

__all__ = [
    "DINOv2",
    "EfficientNetLite0",
    "ErrorCurve",
    "FeatureExtractor",
    "FidelityMeasure",
    "InceptionV3",
    "Pixels",
    "ScoreOptions",
    "error_curve",
    "frechet_distance",
    "is_copied",
    "memorisation",
    "nearest_images",
    "score",
]
