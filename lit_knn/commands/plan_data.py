"""Predicts the memory of images, index and estimators without reading the data and without a GPU."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytorch_lightning as pl
import torch

from lit_knn.common.memory import machine_bytes
from lit_knn.data import DataLayout, ReferenceDataModule
from lit_knn.estimators import Estimator
from lit_knn.estimators.counts import fitted_count
from lit_knn.index import FaissIndex, Index, TorchIndex, default_index

GB = 1e9
# About the memory that a CUDA context takes, with the kernels of PyTorch and its libraries.
CUDA_CONTEXT_BYTES = 600 * 2**20
# The memory that FAISS reserves on a large GPU.
FAISS_BYTES = 1536 * 2**20

Sizes = dict[str, int | None]
"""Bytes by the name of what takes them; None if they are not known."""


class Memory(NamedTuple):
    """The memory of the machine or of each GPU, and what each rank holds there."""

    name: str
    available: float | None  # bytes; None if not known
    ranks: int  # number of processes that share the memory
    sizes: Sizes  # what each rank holds

    @property
    def needed(self) -> int:
        """Number of bytes that all ranks hold, without sizes that are not known."""
        return self.ranks * sum(size or 0 for size in self.sizes.values())

    @property
    def fits(self) -> bool:
        """True if the memory is large enough, as far as sizes are known."""
        return self.available is None or self.needed <= self.available

    def __str__(self) -> str:
        """Return a line for each size, and one that says whether all of them fit."""
        lines = [f"Each of {self.ranks} rank(s) holds on {self.name}:"]
        for name, size in self.sizes.items():
            lines.append(f"  {name:44}" + ("NOT KNOWN" if size is None else f"{size / GB:8.3f} GB"))

        verdict = "whose memory is not known"
        if self.available is not None:
            verdict = f"which has {self.available / GB:.2f} GB: "
            verdict += "fits" if self.fits else "DOES NOT FIT"
        needed = f"{self.needed / GB:.2f} GB"
        if None in self.sizes.values():
            needed = f"at least {needed}, without what is not known,"
        return "\n".join([*lines, f"{needed} on {self.name}, {verdict}"])


def plan_data(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    data: ReferenceDataModule,
    layout: DataLayout,
    device: torch.device,
) -> list[Memory]:
    """Return what images, index and estimators take: on each GPU and in the machine, or for a CPU in the machine alone.

    Args:
        trainer: has the number of ranks; its callbacks may have estimators.
        model: may have estimators.
        data: has the index, and says how many images are used and whether ranks divide them.
        layout: number, shape and type of all images.
        device: the device of a rank.

    Raises:
        InputError: the index cannot search so many images, or an estimator wants more of them.
    """
    shape = layout.shape[1:]
    d = math.prod(shape)
    ranks = trainer.world_size // trainer.num_nodes
    shards = trainer.world_size if data.sharded else 1
    # If the number of images is no multiple of the shards, the largest shard counts.
    N = math.ceil(training_images(data, layout) / shards) * data.rows_per_image
    images = f"images, {N:,} x {'x'.join(map(str, shape))}"
    size = (N + data.held_out * data.rows_per_image) * d * layout.value_bytes
    # A mapped file counts as nothing, because the system drops its pages when memory is short.
    machine: Sizes = {images: 0 if data.mapped else size}
    held: Sizes = {images: size}

    estimators = list(estimators_of(trainer, model))
    mirrored = data.hflip and data.rows_per_image == 1
    check_limits(estimators, shards * N * (1 + mirrored), d, mirrored)
    conditioning = getattr(model, "conditioning", None)
    if conditioning and estimators and not layout.by_class:
        held["images copied by class"] = size
    if conditioning and conditioning.label_dropout:
        # For dropped labels, there is a set of all images beside the sets of the classes.
        N *= 2
    for estimator in estimators:
        name = type(estimator).__name__
        held |= sizes_of(estimator, name, shards * N * (1 + mirrored), d)

    index = data.index or default_index(device, layout.value_bytes == 1)
    index_sizes = searched_sizes(index, estimators, N, d, device)
    if index_sizes:
        held["index"] = index_sizes["index"]
        if device.type == "cpu" or not isinstance(index, TorchIndex):
            machine |= index_sizes
        if isinstance(index, FaissIndex):
            held["work arrays of FAISS"] = 0 if device.type == "cpu" else FAISS_BYTES
            if index.shared and shards == 1:
                # The processes of a machine map one file, so each counts its share of it.
                machine["index"] = index.memory(N, d)["index"] // ranks

    if device.type == "cpu":
        return [Memory("the machine", machine_bytes(), ranks, held | machine)]
    held["CUDA context, about"] = CUDA_CONTEXT_BYTES
    available = None
    if torch.cuda.is_available():
        available = torch.cuda.get_device_properties(device).total_memory
    return [
        Memory("each device", available, 1, held),
        Memory("the machine", machine_bytes(), ranks, machine),
    ]


def training_images(data: ReferenceDataModule, layout: DataLayout) -> int:
    """Return the number of images that a run trains on, without mirror images."""
    return data.train_images or layout.shape[0] - data.held_out


def check_limits(estimators: Sequence[Estimator], N: int, d: int, mirrored: bool) -> None:
    """Raise InputError if an estimator wants more images, or mirrored pairs of them, than the N there are."""
    for estimator in estimators:
        for option in getattr(estimator, "limits", {}):
            fitted_count(estimator, option, N, d, mirrored)


def searched_sizes(
    index: Index, estimators: Sequence[Estimator], N: int, d: int, device: torch.device
) -> Sizes:
    """Return the bytes of an index, and of arrays for building it, by name; nothing if no estimator searches.

    Args:
        index: the index, which is not built.
        estimators: the estimators of the run. One that does not tell its memory counts as one that searches.
        N: number of images.
        d: dimension of an image.
        device: the device that searches.

    Raises:
        InputError: the index cannot search so many images or neighbours.
    """
    neighbours = []
    for estimator in estimators:
        if getattr(estimator, "searches", not hasattr(estimator, "memory")):
            neighbours.append(getattr(estimator, "k", 1))
    if not neighbours:
        return {}
    index.check(N, d, device, min(max(neighbours), N))
    return sizes_of(index, "index", N, d)


def sizes_of(part: object, name: str, N: int, d: int) -> Sizes:
    """Return the bytes, by name, that an estimator or index needs according to its method `memory`.

    Args:
        part: the estimator or index.
        name: the name of its unknown size if it does not have this method.
        N: number of images.
        d: dimension of an image.
    """
    memory = getattr(part, "memory", None)
    return {name: None} if memory is None else memory(N, d)


def estimators_of(trainer: pl.Trainer, model: pl.LightningModule) -> Iterator[Estimator]:
    """Yield the estimators of model and callbacks that need the images; of wrapped ones, those inside."""
    for part in (model, *trainer.callbacks):  # type: ignore[attr-defined]
        named = getattr(part, "estimators", None)
        if isinstance(named, dict):
            for estimator in named.values():
                yield from _inside(estimator)


def _inside(estimator: Estimator) -> Iterator[Estimator]:
    """Yield the estimators in a wrapper, or the estimator itself if it is none, unless they need no images."""
    parts = [part for part in vars(estimator).values() if isinstance(part, Estimator)]
    for part in parts:
        yield from _inside(part)
    if not parts and estimator.needs_reference:
        yield estimator
