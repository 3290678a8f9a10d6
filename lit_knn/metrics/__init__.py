"""Metrics of estimators and of generated samples."""

from lit_knn.metrics.frechet import pixel_frechet_distance
from lit_knn.metrics.memorisation import MemorisationMetric, NearestImages, is_copied, nearest_images

__all__ = ["MemorisationMetric", "NearestImages", "is_copied", "nearest_images", "pixel_frechet_distance"]
