"""Metrics of estimators and of generated samples."""

from lit_knn.metrics.agreement import Agreement, agreement
from lit_knn.metrics.error_curve import ErrorCurve, error_curve
from lit_knn.metrics.estimator_error import (
    ErrorTerms,
    LatentMeans,
    MeanAndError,
    bias_share,
    error_terms,
    mean_and_error,
    share_and_error,
)
from lit_knn.metrics.features import DINOv2, EfficientNetLite0, FeatureExtractor, InceptionV3, Pixels
from lit_knn.metrics.fidelity import (
    FeatureStatistics,
    FeatureSums,
    frechet_distance,
    frechet_distance_of_statistics,
    image_statistics,
    inception_score,
    kernel_distance,
    precision_recall,
)
from lit_knn.metrics.fidelity_measure import FidelityMeasure
from lit_knn.metrics.mean_pictures import mean_pictures
from lit_knn.metrics.memorisation import (
    LikestPairs,
    MemorisationMetric,
    NearestImages,
    is_copied,
    memorisation,
    nearest_images,
)
from lit_knn.metrics.network_agreement import network_agreement
from lit_knn.metrics.samples import measure_samples
from lit_knn.metrics.size_calibration import calibrated_sizes

__all__ = [
    "Agreement",
    "DINOv2",
    "EfficientNetLite0",
    "ErrorCurve",
    "ErrorTerms",
    "FeatureExtractor",
    "FeatureStatistics",
    "FeatureSums",
    "FidelityMeasure",
    "InceptionV3",
    "LatentMeans",
    "LikestPairs",
    "MeanAndError",
    "MemorisationMetric",
    "NearestImages",
    "Pixels",
    "agreement",
    "bias_share",
    "calibrated_sizes",
    "error_curve",
    "error_terms",
    "frechet_distance",
    "frechet_distance_of_statistics",
    "image_statistics",
    "inception_score",
    "is_copied",
    "kernel_distance",
    "mean_and_error",
    "mean_pictures",
    "measure_samples",
    "memorisation",
    "nearest_images",
    "network_agreement",
    "precision_recall",
    "share_and_error",
]
