"""Measures any estimator of the posterior mean on frozen cases, beside a reference estimator."""

from lit_knn.referee.protocol import referee

__all__ = ["referee"]
