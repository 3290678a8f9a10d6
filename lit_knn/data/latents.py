"""Latents of the images of another data module, which an autoencoder encodes and decodes."""

from typing import Any

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, prefixed
from lit_knn.data.array_files import read_array_file
from lit_knn.data.autoencoders import Autoencoder
from lit_knn.data.base import DataLayout, Images, Labels, ReferenceDataModule
from lit_knn.data.encoding import check_decoder, encode_images, encoded
from lit_knn.data.latent_files import StoredLatents, encoding_of, read_stored_latents
from lit_knn.data.parts import Part
from lit_knn.index import Index
from lit_knn.index.pca import sample_size
from lit_knn.reference import ReferenceSet
from lit_knn.reference.row_view import RowView

# The latents in a file may come from another device or precision than those that they are compared with.
# This is the largest difference, as a share of the latents' norm.
FILE_TOLERANCE = 0.02
# Number of latents of a file that are compared with those of their images.
COMPARED = 16
# An autoencoder learns from as many images as 128 MB hold, but from at least twice this number.
HALF_OF_LEAST_LEARNED = 1024


MIRRORED_LATENTS = "data.hflip=true would mirror latents, which are not those of mirrored images"
MIRRORED_ADVICE = "write latents of both by lit-knn prepare --autoencoder"


class Latents(ReferenceDataModule):
    """Latents as the training data and the reference set, encoded once, before training. Samples are decoded.

    Estimators, losses and samplers work on latents. `SampleGrid`, `SampleWriter` and the Fréchet distances decode the
    samples, and compare them with the images. All other callbacks see latents.

    Args:
        images: data module of the images; its images and labels are used, and its index and sizes of batches are not.
        autoencoder: an `lit_knn.data.autoencoders.Autoencoder`. One that learns gets held-out images, too.
        path: an .npy file with the latents of all images in their order: one that `lit-knn prepare --autoencoder`
            wrote, which may also have those of the mirrored images, for `hflip`; or `reference.images` of the same
            `Latents` without a path. Null to encode at every start.
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
        if self.hflip and path is None:
            raise InputError(f"{MIRRORED_LATENTS}: {MIRRORED_ADVICE}, and name them as data.path")
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

    @property
    def rows_per_image(self) -> int:
        return 2 if self.hflip else 1

    def prepare_data(self) -> None:
        self.images.prepare_data()

    def load(self) -> tuple[Images, Labels]:
        """Load the images, and encode all of them or read their latents."""
        # `self.images` asks the trainer's model whether labels are used.
        self.images.trainer = self.trainer
        images, labels = self.images.load()
        self.class_names = self.images.class_names
        whole = ReferenceSet(images, hflip=self.hflip)
        with prefixed(type(self.autoencoder).__name__):
            # Most autoencoders learn nothing, and the images may then stay on the disk.
            if type(self.autoencoder).fit is not Autoencoder.fit:
                # If the data set is large, it learns from evenly spaced images.
                learned = sample_size(whole.N, whole.d, HALF_OF_LEAST_LEARNED)
                self.autoencoder.fit(whole.gather(torch.linspace(0, whole.N - 1, learned).long()))
            if self.path:
                latents = self._read(self.path, whole)
            else:
                latents = encode_images(whole, self.autoencoder, self.encode_batch)
            check_decoder(self.autoencoder, latents[:2].float(), whole.shape)
        # The images are split like the latents, so that samples are compared with the same ones.
        mapped, sha256 = self.images.mapped, self.images.sha256
        sets = super().sets(images, None, sha256=sha256, mapped=mapped)
        self.image_reference, self.held_out_image_reference = sets

        if self.hflip and labels is not None:
            labels = torch.as_tensor(labels).repeat(2)
        return latents, labels

    def read_labels(self) -> Labels:
        return self.images.read_labels()

    def stored(self) -> DataLayout | None:
        if self.path is None or encoding_of(self.path) is None:
            return None
        latents = read_stored_latents(self.path).latents
        self.mapped = True
        return DataLayout(tuple(latents.shape), latents.element_size())

    def sets(
        self,
        images: Images,
        labels: Labels,
        index: Index | None = None,
        sha256: str | None = None,
        mapped: bool | None = None,
    ) -> tuple[ReferenceSet, ReferenceSet | None]:
        """Make the sets of the latents; the arguments are those of the base class, and `images` are the latents.

        With `hflip` their second half is of mirrored images, and is split like the first.
        """
        if not self.hflip:
            return super().sets(images, labels, index, sha256, mapped)

        latents, N = torch.as_tensor(images), len(images) // 2
        labels_once = None if labels is None else labels[:N]

        def both_halves(part: Part, index: Index | None) -> ReferenceSet:
            """Make the set of the latents whose numbers are `part.images`, and of their mirrored images."""
            rows = torch.as_tensor(part.images)
            both = torch.cat([rows, rows + N])
            chosen = latents if len(rows) == N else RowView(latents, both)
            repeated = None if part.labels is None else torch.as_tensor(part.labels).repeat(2)
            return ReferenceSet(chosen, index, labels=repeated, sha256=part.sha256)

        training, held_out = self._split(torch.arange(N), labels_once, sha256, mapped=False)
        reference = both_halves(training, index)
        return reference, None if held_out is None else both_halves(held_out, None)

    def _read(self, path: str, images: ReferenceSet) -> Tensor:
        """Read the latents of all images, (N, *latent_shape); compare some with their images, unless hashes agree."""
        if encoding_of(path) is not None:
            stored = read_stored_latents(path)
            self.mapped = True
            if self.hflip and stored.mirrored is None:
                raise InputError(
                    f"data.hflip=true: data.path={path} was written with --no-mirrored"
                )
            latents = stored.latents
            if self.hflip and stored.mirrored is not None:
                latents = stored.mirrored
            self.sha256 = stored.description.sha256
            if self._is_of_these(stored):
                return latents
        elif self.hflip:
            raise InputError(f"{MIRRORED_LATENTS}: {MIRRORED_ADVICE}")
        else:
            latents = torch.as_tensor(read_array_file(path, floats_as_is=True)[0])

        if len(latents) != images.N:
            raise InputError(f"data.path={path} holds {len(latents)} latents for {images.N} images")

        # The first and the last latent alone would not do: they may be in place even if those between are not, as in
        # a file that joins the latents of several ranks.
        some = torch.linspace(0, images.N - 1, min(images.N, COMPARED)).long()
        expected = encoded(self.autoencoder, images.gather(some))
        alike = expected.shape[1:] == latents.shape[1:]
        if not alike or (latents[some] - expected).norm() > FILE_TOLERANCE * expected.norm():
            problem = "its latents are not those of the images in their order by this autoencoder"
            raise InputError(f"data.path={path}: {problem}")
        return latents

    def _is_of_these(self, stored: StoredLatents) -> bool:
        """Return whether latents in a file are known, by hashes, to be of these images by this autoencoder."""
        made = stored.encoding["settings"], stored.encoding["images_sha256"]
        return made == (self.autoencoder.settings(), self.images.sha256)
