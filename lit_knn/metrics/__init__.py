"""Metrics of estimators and of generated samples."""

from lit_knn.metrics.estimator_error import ErrorTerms, LatentMeans, MeanAndError, error_terms
from lit_knn.metrics.frechet import pixel_frechet_distance
from lit_knn.metrics.memorisation import MemorisationMetric, NearestImages, is_copied, nearest_images

__all__ = [
    "ErrorTerms",
    "LatentMeans",
    "MeanAndError",
    "MemorisationMetric",
    "NearestImages",
    "error_terms",
    "is_copied",
    "nearest_images",
    "pixel_frechet_distance",
]
