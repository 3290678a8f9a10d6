"""Autoencoders: maps from images to latents and back, for training on latents and seeing images."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.settings import RecordsArguments
from lit_knn.index.pca import PrincipalComponents, principal_components
from lit_knn.index.precision import full_float32


class Autoencoder(RecordsArguments, ABC):
    """Maps images to latents and back. A subclass implements `encode` and `decode`, which draw no random numbers.

    Latents should have about the standard deviation that the model expects, `sigma_data` of `LitEDM`: multiply them by
    a constant in `encode`, and divide by it in `decode`.
    """

    def fit(self, images: Tensor) -> None:
        """Learn from images (N, *shape), float32 in model space, before the first `encode`. The default learns nothing.

        It must learn the same in every process. Of a large data set it gets only some of the images.
        """
        return

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Map images (B, *shape), float32 in model space, on the CPU, to latents (B, *latent_shape), on any device."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Map latents (B, *latent_shape), float32, to images (B, *shape) in model space; both may be on any device."""


class PCA(Autoencoder):
    """Principal components as a linear autoencoder. With as many components as pixels, only rounding is lost.

    Args:
        latent_shape: shape of the latents; their number of values is the number of components.
        scale: factor by which `encode` multiplies the components.
    """

    def __init__(self, latent_shape: Sequence[int], scale: float = 1.0) -> None:
        self.latent_shape = tuple(latent_shape)
        self.scale = scale
        self._components: PrincipalComponents | None = None
        self._shape: tuple[int, ...] = ()

    def fit(self, images: Tensor) -> None:
        """Compute the principal components of the images."""
        flat, r = images.flatten(1), prod(self.latent_shape)
        if r > min(flat.shape):
            latents = f"latent_shape={list(self.latent_shape)} has {r} components"
            data = f"{len(flat)} images of {flat.shape[1]} values"
            raise InputError(f"{latents}, but there are {data}")
        self._components = principal_components(flat, flat.mean(0), r)
        self._shape = tuple(images.shape[1:])

    @full_float32()
    def encode(self, images: Tensor) -> Tensor:
        assert self._components is not None, "encode needs fit(images) first"
        latents = self._components.to(images.device).project(images)
        return self.scale * latents.reshape(-1, *self.latent_shape)

    @full_float32()
    def decode(self, latents: Tensor) -> Tensor:
        assert self._components is not None, "decode needs fit(images) first"
        components = self._components.to(latents.device)
        images = components.expand(latents.flatten(1) / self.scale) + components.mean
        return images.reshape(-1, *self._shape)
