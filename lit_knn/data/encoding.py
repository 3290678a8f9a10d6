"""Encodes images by an autoencoder, and checks what it decodes."""

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.progress import with_progress
from lit_knn.data.autoencoders import Autoencoder
from lit_knn.reference import ReferenceSet


def encode_images(images: ReferenceSet, autoencoder: Autoencoder, batch_size: int = 256) -> Tensor:
    """Encode all images in their order, by an autoencoder that is fitted already.

    Args:
        images: the images.
        autoencoder: encodes them.
        batch_size: images that are encoded at a time.

    Returns:
        (N, *latent_shape), float32, on the CPU.
    """
    batches = with_progress(torch.arange(images.N).split(batch_size), images.N, "Encoding")
    return torch.cat([encoded(autoencoder, images.gather(ids)) for ids in batches])


@torch.no_grad()
def encoded(autoencoder: Autoencoder, images: Tensor) -> Tensor:
    """Encode images (B, *shape): (B, *latent_shape), float32, on the CPU."""
    latents = autoencoder.encode(images)
    if len(latents) != len(images):
        raise InputError(f"encode returned {len(latents)} latents for {len(images)} images")
    return latents.to("cpu", torch.float32)


@torch.no_grad()
def check_decoder(autoencoder: Autoencoder, latents: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a decoder whose images have another shape than the data's. Only the first validation would notice it."""
    images = autoencoder.decode(latents)
    expected = (len(latents), *shape)
    if images.shape != expected:
        rule = f"images of shape {expected} for {len(latents)} latents"
        raise InputError(f"decode must return {rule}, got {tuple(images.shape)}")
