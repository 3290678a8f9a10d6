"""Autoencoders: maps from images to latents and back, for training on latents and seeing images."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, check_at_least, check_positive
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.settings import RecordsArguments
from lit_knn.data.vae_files import hash_of_weights, load_vae
from lit_knn.index.pca import PrincipalComponents, principal_components
from lit_knn.index.precision import full_float32

if TYPE_CHECKING:  # The extra `hub` is needed only by `AutoencoderKL`.
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL as VAE

# A VAE encodes and decodes as many images at a time as have this number of pixels: 8 of 256x256.
PIXELS_AT_A_TIME = 8 * 256 * 256


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


class AutoencoderKL(Autoencoder):
    """A variational autoencoder of the library `diffusers`, such as Stable Diffusion's. It needs the extra `hub`.

    Latents are (y − shift_factor) · scaling_factor · scale, where y is the mean of the posterior of the image, or a
    draw from it. Both factors come from the autoencoder's configuration. Stable Diffusion's latents have about
    standard deviation 1 with scale 1: flows expect that, and `LitEDM` with `sigma_data` 1. It works on the GPU, if the
    machine has one, a few images at a time.

    Args:
        path: a folder that `save_pretrained` wrote; or a name on the Hub, as hf://stabilityai/sd-vae-ft-ema, perhaps
            with a folder in it, as hf://user/name/vae.
        draw_seed: null encodes an image as the mean of its posterior; a number as a draw from the posterior, whose
            noise depends on this number and on the image alone.
        scale: a further factor of the latents.

    Raises:
        InputError: there is no such autoencoder, or it encodes images of other channels.
    """

    def __init__(self, path: str, draw_seed: int | None = None, scale: float = 1.0) -> None:
        check_positive(scale=scale)
        if draw_seed is not None:
            check_at_least(0, draw_seed=draw_seed)
        self.path = path
        self.draw_seed = draw_seed
        self.scale = scale
        # `describe` would hash a network under another name than one of the settings.
        self.vae: VAE | None = None
        self._weights = ""

    def settings(self) -> dict[str, object]:
        """Return the arguments, with a hash of the weights, `vae`, in place of their path."""
        return {"vae": self.weights(), "draw_seed": self.draw_seed, "scale": self.scale}

    def weights(self) -> str:
        """Return a hash of the weights, 64 hexadecimal digits."""
        self.loaded()
        return self._weights

    def loaded(self) -> "VAE":
        """Load the autoencoder once, and move it to this process's GPU, if there is one."""
        if self.vae is None:
            self.vae = load_vae(self.path)
            self._weights = hash_of_weights(self.vae)

        # Which GPU is this process's is known only after the data module was made.
        self.vae.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
        return self.vae

    def factors(self) -> tuple[float, float]:
        """Return the factor of latents, and what is subtracted before; see the class."""
        config = self.loaded().config
        return config["scaling_factor"] * self.scale, config["shift_factor"] or 0.0

    @full_float32()
    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) in model space to scaled latents, float32, some images at a time."""
        vae = self.loaded()
        channels = vae.config["in_channels"]
        if images.ndim != 4 or images.shape[1] != channels:
            problem = f"{self.path} encodes images of {channels} channels"
            raise InputError(f"{problem}, got items of shape {tuple(images.shape[1:])}")

        encoded = []
        for part in images.split(_at_a_time(images.shape)):
            posterior = vae.encode(part.to(vae.device, torch.float32)).latent_dist
            latents = posterior.mean
            if self.draw_seed is not None:
                latents = latents + posterior.std * self._noise(part, latents)
            encoded.append(latents)

        factor, shift = self.factors()
        return (torch.cat(encoded) - shift) * factor

    @full_float32()
    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Map scaled latents to images (B, C, H, W). Their values are not limited to [-1, 1]."""
        vae = self.loaded()
        factor, shift = self.factors()
        unscaled = latents.to(vae.device, torch.float32) / factor + shift

        # Each level but the last has half as many rows and columns as the one before.
        side = 2 ** (len(vae.config["block_out_channels"]) - 1)
        number = _at_a_time((len(latents), 1, side * latents.shape[2], side * latents.shape[3]))
        return torch.cat([vae.decode(part).sample for part in unscaled.split(number)])

    def _noise(self, images: Tensor, latents: Tensor) -> Tensor:
        """Return the noise of the draw of each image, like `latents`. It depends on the seed and the image alone."""
        assert self.draw_seed is not None
        noise = []
        for image in images.cpu():
            digest = hashlib.blake2b(image.contiguous().numpy(), digest_size=8).digest()
            key = self.draw_seed, int.from_bytes(digest, "little"), Stream.ENCODING
            noise.append(torch.randn(latents.shape[1:], generator=keyed_generator("cpu", *key)))
        return torch.stack(noise).to(latents.device)


def _at_a_time(shape: Sequence[int]) -> int:
    """Return how many images of a shape (B, C, H, W) a VAE encodes at a time."""
    return max(PIXELS_AT_A_TIME // (shape[2] * shape[3]), 1)
