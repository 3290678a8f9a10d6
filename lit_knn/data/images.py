"""The one door to images: it finds the kind of a path by looking, and reads it by the data module of that kind."""

from pathlib import Path
from typing import Any

from lit_knn.common.errors import InputError
from lit_knn.data.array_keys import LABEL_KEYS
from lit_knn.data.base import DataLayout, Labels, ReferenceDataModule
from lit_knn.data.base import Images as ImageArray
from lit_knn.data.latent_files import encoding_of, images_and_autoencoder
from lit_knn.data.latents import Latents
from lit_knn.data.modules import Arrays, ImageFiles, Prepared
from lit_knn.data.prepared import is_prepared
from lit_knn.index import Index
from lit_knn.reference import ReferenceSet

# Latents are split into parts together with their images, by the reader.
OPTIONS_OF_PARTS = ("hflip", "sharded", "held_out", "train_images")


class Images(ReferenceDataModule):
    """Images, latents or vectors of any kind of file that is read; labels come with them.

    An .npy file that `lit-knn prepare` wrote is read by `Prepared`, other .npy and .npz files by `Arrays`, and folders,
    zips, tars, tables of Hugging Face `datasets` and LMDBs by `ImageFiles`, into memory. For more images than memory
    holds, or images of several sizes, use `lit-knn prepare` first.

    Latents of `lit-knn prepare --autoencoder` are read by `Latents`, with the images and the autoencoder that the .json
    beside them names. Samples are then decoded, and compared with the images.

    Args:
        path: the file or folder, see `lit-knn prepare --help`.
        labels_from_folders: as of `ImageFiles`.
        label_key: as of `ImageFiles`.
        floats_as_is: as of `Arrays`.
    """

    def __init__(
        self,
        path: str,
        labels_from_folders: bool = False,
        label_key: str | None = None,
        floats_as_is: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        suffix = Path(path).suffix.lower()

        is_array = suffix in (".npy", ".npz")
        if is_array and labels_from_folders:
            rule = "is for image files: give --labels-from-folders to lit-knn prepare"
            raise InputError(f"data.path={path}: data.labels_from_folders {rule}")
        if is_array and label_key is not None:
            rule = f"is for tables and tars: an .npz file has labels as {', '.join(LABEL_KEYS)}"
            raise InputError(f"data.path={path}: data.label_key={label_key} {rule}")

        self.reader: ReferenceDataModule
        encoding = encoding_of(path)
        if encoding is not None:
            images, self.autoencoder = images_and_autoencoder(path, encoding)
            parts = {name: getattr(self, name) for name in OPTIONS_OF_PARTS}
            self.reader = Latents(Prepared(images), self.autoencoder, path, **parts)
        elif is_prepared(Path(path).expanduser()):
            self.reader = Prepared(path)
        elif is_array:
            self.reader = Arrays(path, floats_as_is)
        else:
            self.reader = ImageFiles(path, labels_from_folders, label_key)

    @property
    def rows_per_image(self) -> int:
        return self.reader.rows_per_image

    def load(self) -> tuple[ImageArray, Labels]:
        """Load the images or latents by the reader, and take over what it found out."""
        # These tell whether labels are used.
        self.reader.trainer, self.reader.needs_labels = self.trainer, self.needs_labels
        images, labels = self.reader.load()
        self.class_names, self.sha256 = self.reader.class_names, self.reader.sha256
        self.mapped = self.reader.mapped
        self.image_reference = self.reader.image_reference
        self.held_out_image_reference = self.reader.held_out_image_reference
        return images, labels

    def sets(
        self,
        images: ImageArray,
        labels: Labels,
        index: Index | None = None,
        sha256: str | None = None,
        mapped: bool | None = None,
    ) -> tuple[ReferenceSet, ReferenceSet | None]:
        """Make the sets as the base class does, or as `Latents`, which know where the mirrored ones lie."""
        if isinstance(self.reader, Latents):
            # `lit-knn probe` holds images out after they are loaded.
            self.reader.held_out, self.reader.train_images = self.held_out, self.train_images
            return self.reader.sets(images, labels, index, sha256, mapped)
        return super().sets(images, labels, index, sha256, mapped)

    def read_labels(self) -> Labels:
        return self.reader.read_labels()

    def stored(self) -> DataLayout | None:
        layout = self.reader.stored()
        self.mapped = self.reader.mapped
        return layout
