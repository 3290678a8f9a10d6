"""Feature extractors. Metrics compare images by their features."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lit_knn.common.errors import InputError

MOST_PIXELS = 16_384
"""The most values of an image whose pixels are compared: their covariance has 2.1 GB, and its root takes minutes."""


class FeatureExtractor(ABC):
    """Maps images in model space to features. `load` is called first, and raises an error if anything is missing."""

    metric: str  # name of the Fréchet distance of these features in logs and files
    num_features: int  # length of a feature vector; known after `load`
    num_logits: int = 0  # number of class logits; with 0 there is no Inception Score

    @abstractmethod
    def load(self, shape: tuple[int, ...], device: torch.device | str) -> None:
        """Get ready for images of `shape` on `device`; a second call only moves the network.

        It raises InputError if weights or a package are missing or wrong, or images of this shape are not supported.
        """

    @abstractmethod
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map images (B, *shape) to features (B, num_features) and logits (B, num_logits) or None, float32."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that identifies this extractor and its weights. Call this after `load`."""


class Pixels(FeatureExtractor):
    """The images themselves, of any shape, in model space. These features suit small images such as the digits."""

    metric = "fd_pixels"

    def load(self, shape: tuple[int, ...], device: torch.device | str) -> None:
        self.num_features = int(torch.Size(shape).numel())
        if self.num_features > MOST_PIXELS:
            gigabytes = self.num_features**2 * 8 / 1e9
            problem = f"images of shape {tuple(shape)} need a covariance of {gigabytes:.0f} GB"
            other = "compare features instead, such as those of lit_knn.metrics.EfficientNetLite0"
            raise InputError(f"pixels: {problem}; {other}")

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        return images.flatten(1).float(), None

    def fingerprint(self) -> str:
        return "pixels"
