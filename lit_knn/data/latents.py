"""Latents of the images of another data module, which an autoencoder encodes and decodes."""

from typing import Any

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.progress import with_progress
from lit_knn.data.array_files import read_array_file
from lit_knn.data.autoencoders import Autoencoder
from lit_knn.data.base import Images, Labels, ReferenceDataModule
from lit_knn.index.pca import sample_size
from lit_knn.reference import ReferenceSet

# The latents in a file may come from another device or precision than those that they are compared with.
# This is the largest difference, as a share of the latents' norm.
FILE_TOLERANCE = 0.02
# Number of latents of a file that are compared with those of their images.
COMPARED = 16
# An autoencoder learns from as many images as 128 MB hold, but from at least twice this number.
HALF_OF_LEAST_LEARNED = 1024


class Latents(ReferenceDataModule):
    """Latents as the training data and the reference set, encoded once, before training. Samples are decoded.

    Estimators, losses and samplers work on latents. `SampleGrid`, `SampleWriter` and the Fréchet distances decode the
    samples, and compare them with the images. All other callbacks see latents.

    Args:
        images: data module of the images; its images and labels are used, and its index and sizes of batches are not.
        autoencoder: an `lit_knn.data.autoencoders.Autoencoder`. One that learns gets held-out images, too.
        path: an .npy file with the latents of all images in their order, such as `reference.images` of the same
            `Latents` without a path; null to encode at every start.
        encode_batch: images that are encoded at a time.
    """

    autoencoder: Autoencoder

    def __init__(
        self,
        images: ReferenceDataModule,
        autoencoder: Autoencoder,
        path: str | None = None,
        encode_batch: int = 256,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.hflip:
            reason = "which are not those of mirrored images"
            raise InputError(f"data.hflip=true would mirror latents, {reason}")
        if self.sharded:
            raise InputError("data.sharded=true does not work with Latents")
        for option in ("hflip", "sharded", "held_out", "train_images"):
            value = getattr(images, option)
            if value:
                problem = f"data.images.{option}={value} is not used"
                raise InputError(f"{problem}: it is an option of Latents")
        self.images = images
        self.autoencoder = autoencoder
        self.path = path
        self.encode_batch = encode_batch

    def prepare_data(self) -> None:
        self.images.prepare_data()

    def load(self) -> tuple[Images, Labels]:
        """Load the images, and encode all of them or read their latents."""
        # `self.images` asks the trainer's model whether labels are used.
        self.images.trainer = self.trainer
        images, labels = self.images.load()
        self.class_names = self.images.class_names
        whole = ReferenceSet(images)
        with prefixed(type(self.autoencoder).__name__):
            # Of a large data set it learns from evenly spaced images.
            learned = sample_size(whole.N, whole.d, HALF_OF_LEAST_LEARNED)
            self.autoencoder.fit(whole.gather(torch.linspace(0, whole.N - 1, learned).long()))
            if self.path:
                latents = self._read(self.path, whole)
            else:
                latents = encode_images(whole, self.autoencoder, self.encode_batch)
            _check_decoder(self.autoencoder, latents[:2], whole.shape)
        # The images are split like the latents, so that samples are compared with the same ones.
        mapped, sha256 = self.images.mapped, self.images.sha256
        sets = self.sets(images, None, sha256=sha256, mapped=mapped)
        self.image_reference, self.held_out_image_reference = sets
        return latents, labels

    def read_labels(self) -> Labels:
        return self.images.read_labels()

    def _read(self, path: str, images: ReferenceSet) -> Tensor:
        """Read the latents of all images, (N, *latent_shape), and compare some with their images."""
        latents = torch.from_numpy(read_array_file(path, floats_as_is=True)[0])
        if len(latents) != images.N:
            raise InputError(f"data.path={path} holds {len(latents)} latents for {images.N} images")

        # The first and the last latent alone would not do: they may be in place even if those between are not, as in
        # a file that joins the latents of several ranks.
        some = torch.linspace(0, images.N - 1, min(images.N, COMPARED)).long()
        expected = _encoded(self.autoencoder, images.gather(some))
        alike = expected.shape[1:] == latents.shape[1:]
        if not alike or (latents[some] - expected).norm() > FILE_TOLERANCE * expected.norm():
            problem = "its latents are not those of the images in their order"
            raise InputError(f"data.path={path}: {problem}")
        return latents


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
    return torch.cat([_encoded(autoencoder, images.gather(ids)) for ids in batches])


@torch.no_grad()
def _encoded(autoencoder: Autoencoder, images: Tensor) -> Tensor:
    """Encode images (B, *shape): (B, *latent_shape), float32, on the CPU."""
    latents = autoencoder.encode(images)
    if len(latents) != len(images):
        raise InputError(f"encode returned {len(latents)} latents for {len(images)} images")
    return latents.to("cpu", torch.float32)


@torch.no_grad()
def _check_decoder(autoencoder: Autoencoder, latents: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a decoder whose images have another shape than the data's. Only the first validation would notice it."""
    images = autoencoder.decode(latents)
    expected = (len(latents), *shape)
    if images.shape != expected:
        rule = f"images of shape {expected} for {len(latents)} latents"
        raise InputError(f"decode must return {rule}, got {tuple(images.shape)}")
