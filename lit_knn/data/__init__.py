"""Image files and data modules: their images are the training data and also the reference set of the estimators."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_knn.data.base import DataLayout, ReferenceDataModule
    from lit_knn.data.batches import SeedBatches
    from lit_knn.data.images import Images
    from lit_knn.data.latents import Latents
    from lit_knn.data.modules import CIFAR10, Arrays, Digits, ImageFiles, PointsOnALine, Prepared

__all__ = [
    "CIFAR10",
    "Arrays",
    "DataLayout",
    "Digits",
    "ImageFiles",
    "Images",
    "Latents",
    "PointsOnALine",
    "Prepared",
    "ReferenceDataModule",
    "SeedBatches",
]


def __getattr__(name: str) -> object:
    # The names are imported at their first use, because the command `prepare` should start without
    # loading torch and Lightning.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_knn.data import base, batches, images, latents, modules

    # `images` comes first, because the other modules import a type of the name `Images`, which is not the class.
    for module in (images, modules, base, batches):
        if name in vars(module):
            return vars(module)[name]
    return vars(latents)[name]
