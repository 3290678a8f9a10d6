"""Data modules: their images are the training data and also the reference set of the estimators."""

from lit_knn.data.latents import Latents
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
    "Latents",
    "PointsOnALine",
    "Prepared",
    "ReferenceDataModule",
    "SeedBatches",
    "Stored",
]
