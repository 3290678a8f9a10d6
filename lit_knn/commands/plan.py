"""`lit-knn plan -c …` tells how much memory a run needs, and tries one step, before the run starts."""

import pytorch_lightning as pl
import torch

from lit_knn.commands.plan_data import GB, Memory, estimators_of, plan_data, training_images
from lit_knn.commands.plan_step import try_step
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.memory import process_bytes, work_bytes
from lit_knn.data import DataLayout, ReferenceDataModule
from lit_knn.data.batches import check_step
from lit_knn.modules.base import EstimatorTraining

# The number of work arrays, each of at most `work_bytes`, that an estimator may hold at the same time.
WORK_ARRAYS = 4
# A training holds so many copies of the weights: network, gradients, two of Adam, and average.
COPIES_OF_WEIGHTS = 5


def plan(
    self: pl.Trainer,
    model: pl.LightningModule,
    datamodule: ReferenceDataModule,
    images: int | None = None,
    image_shape: list[int] | None = None,
    gpu_gb: float | None = None,
    one_step: bool = True,
    ckpt_path: str | None = None,
) -> list[Memory]:
    """Show how much memory each rank of a fit needs, and whether that is available; if not, the exit status is 1.

    If the device of the run is here, the network also trains for a step on blank images, to measure memory and time.

    Args:
        self: Lightning's trainer.
        model: the module.
        datamodule: the data, of which only the size is read.
        images: plan for this number of images instead of the data's.
        image_shape: plan for this image shape, such as [3, 64, 64], instead of the data's.
        gpu_gb: plan for GPUs with this many GB each, instead of the devices of this machine.
        one_step: try one step; without it the memory of activations is not known.
        ckpt_path: checkpoint that the fit resumes from, or `last`; it is checked.
    """
    layout = _layout(datamodule, images, image_shape)
    N = training_images(datamodule, layout) * (1 + datamodule.hflip)
    check_step(N, datamodule.batch_size, self.world_size, self.accumulate_grad_batches)

    device = self.strategy.root_device if gpu_gb is None else torch.device("cuda", 0)
    memories = plan_data(self, model, datamodule, layout, device)
    if gpu_gb is not None:
        # Nothing is known of the machine that has this GPU.
        memories = [
            memories[0]._replace(available=gpu_gb * GB),
            memories[1]._replace(available=None),
        ]
    memories[-1].sizes["this process, with the network"] = process_bytes()
    held = memories[0].sizes
    held["work arrays of estimators, about"] = WORK_ARRAYS * work_bytes(device)

    if isinstance(model, EstimatorTraining):
        if one_step and gpu_gb is None:
            step = try_step(self, model, (datamodule.batch_size, *layout.shape[1:]))
            held[f"a step of {datamodule.batch_size} images"] = step.peak
            print(f"one step on this machine: peak {step.peak / GB:.3f} GB, {step.seconds:.3g} s")
        else:
            print("no step is tried: the device is not here, or --one_step is false")
            weights = sum(parameter.nbytes for parameter in model.parameters())
            held["network, gradients, optimiser, average"] = COPIES_OF_WEIGHTS * weights
            held["activations"] = None

    print(*memories, sep="\n")
    if not all(memory.fits for memory in memories):
        raise SystemExit(1)
    return memories


def check_fits(
    trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None
) -> None:
    """Raise InputError if images, index and arrays of estimators exceed the memory, as far as sizes are known."""
    if not isinstance(datamodule, ReferenceDataModule):
        return
    try:
        stored = datamodule.stored()
        if stored is None:
            return
        memories = plan_data(trainer, model, datamodule, stored, trainer.strategy.root_device)
    except InputError:
        return  # Loading the data or binding the estimators will raise this error with more to say.

    names = [type(estimator).__name__ for estimator in estimators_of(trainer, model)]
    owners = ", ".join(dict.fromkeys(names)) or type(datamodule).__name__
    for memory in memories:
        if memory.available is None or memory.fits:
            continue
        sizes = []
        for name, size in memory.sizes.items():
            if size:
                sizes.append(f"{name.partition(',')[0]} {size / GB:.4g} GB")
        problem = f"{', '.join(sizes)} for each of {memory.ranks} rank(s)"
        limit = f"more than the {memory.available / GB:.4g} GB of {memory.name}"
        advice = "`plan` shows what a run needs"
        raise InputError(f"{owners}: the set does not fit: {problem}, {limit}; {advice}")


def _layout(
    datamodule: ReferenceDataModule, images: int | None, image_shape: list[int] | None
) -> DataLayout:
    """Return number, shape and type of the images, from the data unless number and shape are given.

    Args:
        datamodule: the data.
        images: the number of images, or None for that of the data.
        image_shape: the shape of an image, or None for that of the data.
    """
    if images is not None:
        check_at_least(1, images=images)
    if images is not None and image_shape is not None:
        return DataLayout((images, *image_shape))

    missing = "give --images and --image_shape"
    try:
        stored = datamodule.stored()
    except InputError as error:
        raise InputError(f"plan: {error}; without the data {missing}") from error
    if stored is None:
        raise InputError(f"plan: {type(datamodule).__name__} does not tell its size; {missing}")
    return stored._replace(shape=(images or stored.shape[0], *(image_shape or stored.shape[1:])))
