"""Metrics of estimators and of generated samples."""

from lit_knn.metrics.estimator_error import ErrorTerms, LatentMeans, MeanAndError, error_terms
from lit_knn.metrics.frechet import pixel_frechet_distance

__all__ = ["ErrorTerms", "LatentMeans", "MeanAndError", "error_terms", "pixel_frechet_distance"]
