"""The base of the data modules: the reference set, in one piece or sharded, and its options."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lit_knn.common.distributed import in_every_process, rank_and_size
from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.data.autoencoders import Autoencoder
from lit_knn.data.labels import usable_labels
from lit_knn.data.loaders import ReferenceLoaders
from lit_knn.data.parts import Labels, Part, shard_of, split_off
from lit_knn.index import Index
from lit_knn.reference import ReferenceSet
from lit_knn.reference.sharded import ShardedReferenceSet
from lit_knn.reference.shards import shard_rows

Images = np.ndarray | Tensor


class DataLayout(NamedTuple):
    """The size and layout of images before they are loaded."""

    shape: tuple[int, ...]  # (N, *shape)
    value_bytes: int = 1  # 1 for uint8, 4 for float32, 2 for floats of 16 bits
    # This is True if the images are known to be sorted by class. The images of a class are then a view, not a copy.
    by_class: bool = False


class ReferenceDataModule(ReferenceLoaders, ABC):
    """Images in memory: they are the training data and also the reference set of the estimators.

    Subclasses implement `load`. After `setup`, `reference` is the `ReferenceSet`; its neighbour index is built when an
    estimator needs it.

    Args:
        batch_size: images per batch on each device.
        hflip: add the mirror image of every image, to the training data and to the reference set.
        index: neighbour index of the reference set; null for exact search on a CPU and `TorchIndex` on CUDA.
        seed: sets the order of the images in each epoch; at least 0.
        predict_samples: number of samples that `predict` generates, over all devices, with the seeds 0, 1, 2, ...
        val_images: number of images for validation, over all devices, drawn once; all images if there are fewer.
        sharded: split the images and their index over the devices, which divides the memory by their number and takes
            time for sending; see docs/large_data.md. With exact search the estimates stay the same. Each device indexes
            its own images: an inverted file has as many lists for fewer images, and each device searches `nprobe`.
        held_out: number of images that are kept out of the training data and of the reference set, the same for every
            seed. After `setup` they are `held_out_reference`, and `validate` gives the model batches of them.
        train_images: number of images to train on, of those that are not held out, the same for every seed; null for
            all. More images include those of a smaller number.
    """

    def __init__(
        self,
        batch_size: int = 256,
        hflip: bool = False,
        index: Index | None = None,
        seed: int = 0,
        predict_samples: int = 64,
        val_images: int = 1024,
        sharded: bool = False,
        held_out: int = 0,
        train_images: int | None = None,
    ) -> None:
        super().__init__()
        check_at_least(1, **{"data.batch_size": batch_size})
        check_at_least(0, **{"data.held_out": held_out})
        if train_images is not None:
            check_at_least(1, **{"data.train_images": train_images})
        self.batch_size = batch_size
        self.hflip = hflip
        self.index = index
        self.seed = seed
        self.predict_samples = predict_samples
        self.val_images = val_images
        self.sharded = sharded
        self.held_out = held_out
        self.train_images = train_images

    # Whether the images stay on the disk. Their pages are then read when used, and a machine's ranks share them.
    mapped = False
    # Decodes samples for pictures and Fréchet distances; None if the samples are images themselves.
    autoencoder: Autoencoder | None = None
    # The images of encoded data, after `setup`; None if the reference sets have the images.
    image_reference: ReferenceSet | None = None
    held_out_image_reference: ReferenceSet | None = None
    # The hash of the images' bytes, if `load` knows it without reading them.
    sha256: str | None = None
    # Whether labels are needed even if the model takes none.
    needs_labels = False
    # Names of the classes 0, 1, …, if `load` knows them.
    class_names: list[str] | None = None

    @property
    def source_name(self) -> str:
        """The path of the data, or without a path the name of the class, for messages."""
        return str(getattr(self, "path", None) or type(self).__name__)

    @property
    def rows_per_image(self) -> int:
        """How many rows of what `load` returns an image has: two if it loads the mirror images, too."""
        return 1

    @abstractmethod
    def load(self) -> tuple[Images, Labels]:
        """Load images, uint8 (N, C, H, W) or float (N, *shape) in model space, and labels, (N,) integers, or None."""

    def stored(self) -> DataLayout | None:
        """Return the size and layout of the images, or None if they are not known before `load`."""
        return None

    def read_labels(self) -> Labels:
        """Read the labels, (N,) integers; data modules that can read them alone override it."""
        self.needs_labels = True
        return self.load()[1]

    def setup(self, stage: str | None = None) -> None:
        """Load the data and make the reference set, once.

        Raises:
            InputError: the data do not fit the options; or, with the stage "fit", they are too few for a batch.
        """
        if self.reference is None:
            images, labels = self._loaded()
            if isinstance(labels, Tensor):
                labels = labels.cpu()
            with prefixed(type(self).__name__):
                labels = usable_labels(labels, len(images), self.labels_used, self.source_name)

            if self.sharded:
                training, held_out = self._split(images, labels, self.sha256, self.mapped)
                self.reference = self._shard(training)
                self.held_out_reference = self._reference_set(held_out, None)
            else:
                sets = self.sets(images, labels, self.index, self.sha256)
                self.reference, self.held_out_reference = sets
        if stage == "fit":
            # Called for the error that it raises if the batch size is too large.
            self.train_dataloader()

    @property
    def labels_used(self) -> bool:
        """Whether labels are needed. If not, labels that are not class numbers are left out."""
        model = getattr(self.trainer, "lightning_module", None)
        return self.needs_labels or bool(getattr(model, "conditioning", None))

    def sets(
        self,
        images: Images,
        labels: Labels,
        index: Index | None = None,
        sha256: str | None = None,
        mapped: bool | None = None,
    ) -> tuple[ReferenceSet, ReferenceSet | None]:
        """Make the reference set, and that of the held-out images, which is None if there are none.

        Both keep the order of the data, and every call holds out the same images.

        Args:
            images: all images, (N, *shape).
            labels: (N,) integers, or None.
            index: index of the reference set.
            sha256: hash of the images' bytes, if known.
            mapped: whether the images stay on the disk, so that the parts are views; None for
                the data's `mapped`.
        """
        mapped = self.mapped if mapped is None else mapped
        training, held_out = self._split(images, labels, sha256, mapped)
        reference = self._reference_set(training, index)
        assert reference is not None
        return reference, self._reference_set(held_out, None)

    def _split(
        self, images: Images, labels: Labels, sha256: str | None, mapped: bool
    ) -> tuple[Part, Part | None]:
        """Split the data into the images to train on and those held out; see `split_off`."""
        whole = Part(images, labels, sha256)
        return split_off(whole, self.held_out, self.train_images, mapped)

    def _reference_set(self, part: Part | None, index: Index | None) -> ReferenceSet | None:
        """Make the reference set of a part, or return None if there is no such part."""
        if part is None:
            return None
        return ReferenceSet(part.images, index, self.hflip, part.labels, part.sha256)

    def _loaded(self) -> tuple[Images, Labels]:
        """Call `load` on every rank. If one rank fails, all stop at once instead of waiting in the first collective."""
        # `in_every_process` would send a returned value to all ranks, so the data go into this list.
        loaded: list[tuple[Images, Labels]] = []
        in_every_process(lambda: loaded.append(self.load()))
        images, labels = loaded[0]
        return images, labels

    def _shard(self, part: Part) -> ShardedReferenceSet:
        """Make the shard of this rank."""
        # Without a distributed run, as in `lit-knn plan`, the shard has all images.
        N, (rank, size) = len(part.images), rank_and_size()
        # Every rank raises this error. If only those without an image did, the others would wait for them.
        if size > N:
            raise InputError(f"data.sharded=true: {N} images are too few for {size} ranks")
        rows = shard_rows(N, rank, size)
        shard = shard_of(part, rows, self.mapped)
        return ShardedReferenceSet(shard.images, self.index, self.hflip, shard.labels, shard.sha256)
