"""Data modules: images that are trained on and are, at the same time, the reference set of the estimators."""

from lit_knn.data.modules import (
    CIFAR10,
    Arrays,
    Digits,
    ImageFiles,
    PointsOnALine,
    Prepared,
    ReferenceDataModule,
    SeedBatches,
    Stored,
)

__all__ = [
    "CIFAR10",
    "Arrays",
    "Digits",
    "ImageFiles",
    "PointsOnALine",
    "Prepared",
    "ReferenceDataModule",
    "SeedBatches",
    "Stored",
]
