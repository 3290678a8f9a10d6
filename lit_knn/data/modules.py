"""LightningDataModules: each loads or maps its images and keeps them as a reference set, on every rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from lit_knn.common.distributed import in_every_process
from lit_knn.common.errors import InputError
from lit_knn.common.memory import moved
from lit_knn.common.rng import keyed_generator
from lit_knn.data.array_files import array_file_shape, read_array_file
from lit_knn.data.autoencoders import Autoencoder
from lit_knn.data.batches import ReferenceBatches
from lit_knn.data.digits import read_digits
from lit_knn.data.image_files import count_image_files, read_image_files
from lit_knn.data.prepared import read_prepared
from lit_knn.data.split import split_rows
from lit_knn.index import Index
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import lie_together
from lit_knn.reference.sharded import ShardedReferenceSet, shard_rows

Images = np.ndarray | Tensor
Labels = np.ndarray | Tensor | None
T = TypeVar("T")


class Stored(NamedTuple):
    """The size and layout of images before they are loaded.

    Attributes:
        shape: (N, *shape).
        value_bytes: 1 for uint8, 4 for floats.
        mapped: True if the images stay on the disk; pages are read when used, and the ranks of a machine share them.
        by_class: True if the images are in order of class, so that classes need no copies; False if not known.
    """

    shape: tuple[int, ...]
    value_bytes: int = 1
    mapped: bool = False
    by_class: bool = False


class ReferenceDataModule(pl.LightningDataModule, ABC):
    """Images in memory: they are the training data and also the reference set of the estimators.

    Subclasses implement `load`. After `setup`, `reference` is the `ReferenceSet`; its neighbour index is built when an
    estimator needs it.

    Args:
        batch_size: images per batch on each device.
        hflip: add the mirror image of every image, to the training data and to the reference set.
        index: neighbour index of the reference set; null for exact search by FAISS.
        seed: sets the order of the images in each epoch; at least 0.
        predict_samples: number of samples that `predict` generates, over all devices, with the seeds 0, 1, 2, ...
        val_images: number of images for validation, over all devices, drawn once; all images if there are fewer.
        sharded: split the images and their index over the devices. This divides the memory by the number of devices.
            The devices search for each other, and sending takes time; see the README. With exact search the estimates
            stay the same. Each device indexes its own images with the settings of `index`: an inverted file has the
            same number of lists for fewer images, and each device searches `nprobe` of them.
        held_out: number of images that are kept out of the training data and of the reference set. They are drawn once,
            the same for every seed, so that networks of several seeds compare. After `setup` they are
            `held_out_reference`, and `validate` gives the model batches of them.
        train_images: number of images to train on, of those that are not held out; null for all. More images include
            those of a smaller number, for every seed.

    Raises:
        InputError: batch_size, predict_samples, val_images or train_images < 1, held_out < 0, or seed < 0; at `setup`,
            fewer images than held_out and train_images ask for, or a part of images that are mapped or sharded.
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
        _check_at_least(1, batch_size=batch_size, predict_samples=predict_samples, val_images=val_images)
        _check_at_least(0, seed=seed, held_out=held_out)
        if train_images is not None:
            _check_at_least(1, train_images=train_images)
        self.batch_size = batch_size
        self.hflip = hflip
        self.index = index
        self.seed = seed
        self.predict_samples = predict_samples
        self.val_images = val_images
        self.sharded = sharded
        self.held_out = held_out
        self.train_images = train_images
        self.reference: ReferenceSet | None = None
        self.held_out_reference: ReferenceSet | None = None

    mapped = False
    """True if the images stay on the disk; pages are read when used, and the ranks of a machine share them."""

    autoencoder: Autoencoder | None = None
    """Decodes samples for pictures and Fréchet distances; None if the samples are images themselves."""

    image_reference: ReferenceSet | None = None
    """The images of encoded training data, after `setup`; None if the reference set has the images."""

    held_out_image_reference: ReferenceSet | None = None
    """The images of encoded held-out data."""

    check_file: Callable[[], None] | None = None
    """Raises InputError if the file of the images was cut; None if they are in memory."""

    @abstractmethod
    def load(self) -> tuple[Images, Labels]:
        """Load the data.

        Returns:
            Images, uint8 (N, C, H, W) or float (N, *shape) in model space, and labels, (N,) integers, or None.
        """

    def sha256(self) -> str | None:
        """Return the hash of the images' bytes, or None if it is unknown after `load` without reading the images."""
        return None

    def stored(self) -> "Stored | None":
        """Return the size and layout of the images, for the planner, or None if they are not known before `load`."""
        return None

    def setup(self, stage: str | None = None) -> None:
        """Load the data and make the reference set, once; refuse a too large batch size before training."""
        if self.reference is None:
            self._check_parts()
            images, labels = self._loaded()
            if self.held_out or self.train_images is not None:
                self.reference, self.held_out_reference = self._split(images, labels)
            elif self.sharded:
                self.reference = self._shard(torch.as_tensor(images), labels)
            else:
                self.reference = ReferenceSet(images, self.index, self.hflip, labels, self.sha256())
            self.reference.watch(self.check_file)
        if stage == "fit":
            self.train_dataloader()

    def _check_parts(self) -> None:
        """Refuse a part of images that are mapped or sharded, before they are read."""
        name = "held_out" if self.held_out else "train_images"
        if getattr(self, name) and (self.mapped or self.sharded):
            kind = f"{type(self).__name__}, which maps its file" if self.mapped else "data.sharded=true"
            raise InputError(
                f"data.{name}={getattr(self, name)} does not work with {kind}: prepare a file of the wanted images"
            )

    def _split(self, images: Images, labels: Labels) -> tuple[ReferenceSet, ReferenceSet | None]:
        """Make the reference set and the held-out set. Both keep the order of the data."""
        training, held_out = split_rows(len(images), self.held_out, self.train_images)
        return (
            self._part(images, labels, training, self.index),
            self._part(images, labels, held_out, None) if self.held_out else None,
        )

    def _part(self, images: Images, labels: Labels, rows: Tensor, index: Index | None) -> ReferenceSet:
        # NumPy would take a tensor of one row for a number.
        chosen = [None if part is None else torch.as_tensor(part)[rows] for part in (images, labels)]
        assert chosen[0] is not None
        return ReferenceSet(chosen[0], index, self.hflip, chosen[1])

    def _loaded(self) -> tuple[Images, Labels]:
        """Call `load` on every rank. If one rank fails, all stop at once instead of waiting in the first collective."""
        loaded: list[tuple[Images, Labels]] = []

        def load() -> None:
            loaded.append(_checked(type(self).__name__, self.load()))

        in_every_process(load)
        return loaded[0]

    def _shard(self, images: Tensor, labels: Labels) -> ShardedReferenceSet:
        rank, world_size = self._rank_and_world_size()
        if len(images) < world_size:
            raise InputError(f"data.sharded=true on {world_size} devices needs as many images, there are {len(images)}")
        rows = shard_rows(len(images), rank, world_size)
        # A copy frees the memory of the other shards. A mapped file needs no copy, because it takes no memory.
        shard = images[rows] if self.mapped else images[rows].clone()
        sha256 = self.sha256()
        return ShardedReferenceSet(
            shard,
            self.index,
            self.hflip,
            None if labels is None else labels[rows],
            None if sha256 is None else f"{sha256}, {rows}",
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the images alone: with labels on the host, `ByClass` finds the rows of a class without waiting."""
        if isinstance(batch, Tensor):
            return moved(batch, device)
        return (moved(batch[0], device), *batch[1:])

    def train_dataloader(self) -> ReferenceBatches:
        """Return shuffled batches of all images. A resumed run continues at the batch where it stopped."""
        trainer = self.trainer
        if trainer is None:
            return self._batches()
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return self._batches(shuffle=False)
        return self._batches(batches_done=lambda: _batches_done(trainer))

    def val_dataloader(self) -> ReferenceBatches:
        """Return batches of the same `val_images` images every time: of the held-out images, if there are any."""
        return self._batches(self.held_out_reference, shuffle=False, num_images=self.val_images)

    def test_dataloader(self) -> ReferenceBatches:
        """Return the same batches as for validation."""
        return self.val_dataloader()

    def predict_dataloader(self) -> "SeedBatches":
        """Return batches of seeds, one seed for each sample to generate."""
        return SeedBatches(self.predict_samples, self.batch_size, *self._rank_and_world_size())

    def _batches(self, images: ReferenceSet | None = None, **options: Any) -> ReferenceBatches:
        """Return batches of `images`, by default of the reference set."""
        if self.reference is None:
            raise RuntimeError("call setup() before asking for batches")
        rank, world_size = self._rank_and_world_size()
        images = images or self.reference
        return ReferenceBatches(images, self.batch_size, seed=self.seed, rank=rank, world_size=world_size, **options)

    def _rank_and_world_size(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)


class SeedBatches:
    """Batches of this rank's seeds, int64, 0 <= seed < num_seeds. Rank r has the seeds r, r + world_size, ...

    Raises:
        InputError: fewer seeds than ranks.
    """

    def __init__(self, num_seeds: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if num_seeds < world_size:
            raise InputError(f"data.predict_samples={num_seeds} must be at least the number of devices, {world_size}")
        self._batches = torch.arange(rank, num_seeds, world_size).split(batch_size)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)


class Digits(ReferenceDataModule):
    """The 1,797 handwritten digits of scikit-learn, 8x8, grayscale, with labels. Nothing is downloaded."""

    def load(self) -> tuple[Images, Labels]:
        """The values 0..16 are spread over 0..255."""
        return read_digits()

    def stored(self) -> Stored:
        return Stored((1797, 1, 8, 8))


class PointsOnALine(ReferenceDataModule):
    """Toy data: points on a line, (N, 1), drawn from three Gaussians around −0.6, 0.1 and 0.7; `seed` fixes them.

    Args:
        num_points: N.
    """

    def __init__(self, num_points: int = 40, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _check_at_least(1, num_points=num_points)
        self.num_points = num_points

    def load(self) -> tuple[Images, Labels]:
        """The label of a point is the number of its Gaussian."""
        generator = keyed_generator("cpu", self.seed)
        component = torch.randint(3, (self.num_points,), generator=generator)
        centre, width = torch.tensor([[-0.6, 0.1, 0.7], [0.2, 0.2, 0.15]])[:, component]
        return (centre + width * torch.randn(self.num_points, generator=generator)).unsqueeze(1), component

    def stored(self) -> Stored:
        return Stored((self.num_points, 1), value_bytes=4)


class CIFAR10(ReferenceDataModule):
    """The 50,000 training images of CIFAR-10, 32x32, with labels, through torchvision.

    Args:
        root: folder of `cifar-10-batches-py`; downloads go there, too.
        download: download the data set if it is not there.
    """

    def __init__(self, root: str = "data", download: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        """Download the data in one process of each node."""
        if self.download:
            self._dataset(download=True)

    def load(self) -> tuple[Images, Labels]:
        dataset = self._dataset(download=False)
        return np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2)), np.array(dataset.targets)

    def stored(self) -> Stored:
        return Stored((50_000, 3, 32, 32))

    def _dataset(self, download: bool) -> Any:
        from torchvision.datasets import CIFAR10 as TorchvisionCIFAR10

        try:
            return TorchvisionCIFAR10(self.root, train=True, download=download)
        except (RuntimeError, OSError) as error:
            if download:
                raise InputError(f"CIFAR-10 could not be downloaded to data.root={self.root}: {error}") from error
            raise InputError(
                f"data.root={self.root} has no intact cifar-10-batches-py; put it there or set data.download to true"
            ) from error


class ImageFiles(ReferenceDataModule):
    """PNG and JPEG files in a zip or a folder, in the layout of EDM's data sets.

    All images have the same size and are RGB or grayscale. Labels come from `dataset.json` at the root of the zip or
    folder, if there is one: {"labels": [["00000/img00000.png", 6], ...]}; or from the folders of the images.

    Args:
        path: the .zip file or the folder.
        labels_from_folders: label each image with the place of its folder among all, sorted by name, from 0, as
            torchvision's `ImageFolder` does for `path/CLASS/0.png`; `dataset.json` is then not read.
    """

    def __init__(self, path: str, labels_from_folders: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.labels_from_folders = labels_from_folders

    def load(self) -> tuple[Images, Labels]:
        return _read(read_image_files, self.path, self.labels_from_folders)

    def stored(self) -> Stored:
        """Count the files and read only the first."""
        return Stored(_read(count_image_files, self.path), by_class=self.labels_from_folders)


class Prepared(ReferenceDataModule):
    """Images in an .npy file that `lit-knn prepare` wrote, with its .json. They may be larger than memory.

    The file is mapped: pages are read when used, stay in memory while there is room, and are shared by the ranks of a
    machine. With a GPU, the images are copied to it.

    Args:
        path: the .npy file.
    """

    mapped = True

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path
        self._sha256: str | None = None

    def load(self) -> tuple[Images, Labels]:
        prepared = _read(read_prepared, self.path)
        self._sha256, self.check_file = prepared.sha256, prepared.check_file
        return prepared.images, prepared.labels

    def sha256(self) -> str | None:
        """The hash is in the .json."""
        return self._sha256

    def stored(self) -> Stored:
        prepared = _read(read_prepared, self.path)
        by_class = prepared.labels is not None and lie_together(torch.from_numpy(prepared.labels))
        return Stored(tuple(prepared.images.shape), mapped=self.mapped, by_class=by_class)


class Arrays(ReferenceDataModule):
    """Images, latents or vectors in an .npy or .npz file.

    uint8 images are (N, C, H, W) or (N, H, W, C) with 1 or 3 channels. Floats are (N, *shape) and never rescaled;
    float images should be in [-1, 1].

    Args:
        path: an .npy file, or an .npz file. Its array has the name `images` or `arr_0`, or any name if it is the only
            one; integer `labels` are optional.
        floats_as_is: accept also floats that look like wrong images: 1 or 3 channels, and either values outside
            [-1, 1] or the channels last.
    """

    def __init__(self, path: str, floats_as_is: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.floats_as_is = floats_as_is

    def load(self) -> tuple[Images, Labels]:
        return _read(read_array_file, self.path, self.floats_as_is)

    def stored(self) -> Stored | None:
        """Return None for an .npz file, because its arrays are compressed."""
        if not self.path.lower().endswith(".npy"):
            return None
        shape, value_bytes = _read(array_file_shape, self.path)
        return Stored(shape, value_bytes)


def _batches_done(trainer: pl.Trainer) -> int:
    """Return the number of batches since training began: the module's own count, if it has one, or Lightning's.

    The epoch number would be wrong: Lightning counts an epoch as complete if max_steps stops it half-way. Among
    Lightning's counts of batches, only the processed ones stay right after an interruption.
    """
    counted = getattr(trainer.lightning_module, "batches_done", None)
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return progress.processed if counted is None else counted


def _read(reader: Callable[..., T], path: str, *options: Any) -> T:
    """Call `reader`; its errors also name the option `data.path`."""
    try:
        return reader(path, *options)
    except InputError as error:
        raise InputError(f"data.path={path}: {error}") from error


def _checked(owner: str, loaded: object) -> tuple[Images, Labels]:
    """Return what a `load` of a user's data module gave, or raise InputError if it is no pair of images and labels."""
    kinds = (np.ndarray, Tensor)
    if isinstance(loaded, tuple) and len(loaded) == 2:
        images, labels = loaded
        if isinstance(images, kinds) and (labels is None or isinstance(labels, kinds)):
            return images, labels
    got = [type(part).__name__ for part in loaded] if isinstance(loaded, tuple) else type(loaded).__name__
    raise InputError(f"{owner}.load must return (images, labels), arrays or tensors, or None for labels, got {got}")


def _check_at_least(least: int, **options: int) -> None:
    for name, value in options.items():
        if value < least:
            raise InputError(f"data.{name} must be at least {least}, got {value}")
