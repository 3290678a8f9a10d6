"""Metrics of estimators and of generated samples."""

from lit_knn.metrics.frechet import pixel_frechet_distance

__all__ = ["pixel_frechet_distance"]
