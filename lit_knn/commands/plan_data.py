"""Plans the memory of the images, and of the arrays and indexes that estimators make from them."""

import math
from collections.abc import Sequence

import pytorch_lightning as pl
import torch

from lit_knn.commands.plan_index import index_parts
from lit_knn.commands.plan_network import estimators_of
from lit_knn.commands.plan_table import Part
from lit_knn.common.memory import work_bytes
from lit_knn.data import DataLayout, ReferenceDataModule
from lit_knn.estimators import Estimator, Holdings

# Number of work arrays of bounded size that an estimator may hold at the same time.
WORK_ARRAYS = 4


def data_parts(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: ReferenceDataModule,
    stored: DataLayout,
    device: torch.device,
) -> tuple[list[Part], list[Part]]:
    """Plan the images and the estimators of one rank.

    Args:
        trainer: tells the number of ranks; its callbacks may have estimators.
        model: may have estimators.
        datamodule: the data.
        stored: size and layout of all images.
        device: the device of the rank.

    Returns:
        What lies on `device`, and what lies in the machine's memory until it is there.
    """
    total, *shape = stored.shape
    ranks = trainer.world_size if datamodule.sharded else 1
    N = datamodule.train_images
    if N is None:
        N = total - datamodule.held_out

    # Plan for the largest shard, which has more images than others if the ranks do not divide N.
    of_rank = stored._replace(shape=(-(-N // ranks), *shape))
    image_bytes = math.prod(shape) * stored.value_bytes
    size = (of_rank.shape[0] + datamodule.held_out) * image_bytes

    estimators = estimators_of(trainer, model)
    held, building = estimator_parts(estimators, datamodule, of_rank, device, ranks)
    need_reference = any(estimator.needs_reference for estimator in estimators)
    if getattr(model, "conditioning", None) and not stored.by_class and need_reference:
        note = "copies, which data sorted by class do not need"
        held.insert(0, Part("images by class", size, note))

    others = total * image_bytes - size
    if others and not stored.mapped:
        note = "until this rank has chosen its own"
        building.append(Part("other images", others, note, temporary=True))

    description = _describe_images(of_rank)
    loaded = Part("images", size, f"{description}, in memory")
    if stored.mapped:
        note = f"{description}, mapped from the disk, shared, given up when short"
        loaded = Part("images", 0, note)

    on_device = loaded
    if device.type != "cpu":
        on_device = Part("images", size, f"{description}, copied to the device")
    return [on_device, *held], [loaded, *building]


def _describe_images(stored: DataLayout) -> str:
    N, *shape = stored.shape
    sides = "x".join(map(str, shape))
    dtype = "uint8" if stored.value_bytes == 1 else "float32"
    return f"{N:,} x {sides} {dtype}"


def estimator_parts(
    estimators: Sequence[Estimator],
    data: ReferenceDataModule,
    stored: DataLayout,
    device: torch.device,
    ranks: int = 1,
) -> tuple[list[Part], list[Part]]:
    """Plan the memory of estimators besides the images.

    Args:
        estimators: of one run; they share index and arrays.
        data: names the index, and says whether mirror images count.
        stored: size and layout of the images of one rank.
        device: the device of the rank.
        ranks: number of shards of the images; 1 without shards.

    Returns:
        What lies on `device`, and what lies in the machine's memory until the estimators are bound.
    """
    holdings, unknown = _joint_holdings(estimators, data, stored, device, ranks)
    held: list[Part] = []
    building: list[Part] = []
    if holdings.neighbours:
        index, build = index_parts(data, stored, holdings.neighbours, device, ranks)
        held += holdings.indexes * index
        building += holdings.indexes * build

    for name, size in sorted(holdings.arrays.items()):
        held.append(Part(name, size))

    if any(estimator.needs_reference for estimator in estimators):
        size = WORK_ARRAYS * work_bytes(device)
        held.append(Part("work arrays", size, "of the estimators, about", estimated=True))
    return [*held, *unknown], building


def _joint_holdings(
    estimators: Sequence[Estimator],
    data: ReferenceDataModule,
    stored: DataLayout,
    device: torch.device,
    ranks: int,
) -> tuple[Holdings, list[Part]]:
    """Return what estimators hold together, and a line for each one that does not tell."""
    N = stored.shape[0]
    d = math.prod(stored.shape[1:])
    # Each rank holds the coordinates of the images of all ranks.
    all_images = ranks * N * (1 + data.hflip)

    neighbours, indexes = 0, 1
    arrays: dict[str, int] = {}
    unknown = []
    for estimator in estimators:
        holdings = estimator.holds(all_images, d, stored.value_bytes == 1, device)
        if holdings is None:
            name = type(estimator).__name__
            note = "does not tell what else it holds: NOT KNOWN, not counted"
            unknown.append(Part(name, 0, note, counted=False))
            # The estimator may search for neighbours.
            holdings = Holdings(neighbours=1)

        if estimator.needs_reference:
            neighbours = max(neighbours, holdings.neighbours)
            indexes = max(indexes, holdings.indexes)
        # Arrays of one name are shared.
        for name, size in holdings.arrays.items():
            arrays[name] = max(size, arrays.get(name, 0))
    return Holdings(neighbours, arrays, indexes), unknown
