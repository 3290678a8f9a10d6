"""Plans the memory of a run, and tries one step, before the run starts: `lit-knn plan -c …`."""

import pytorch_lightning as pl
import torch

from lit_knn.commands.plan_data import GB, Memory, estimators_of, plan_data
from lit_knn.commands.plan_step import try_step
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.memory import process_bytes, work_bytes
from lit_knn.data import DataLayout, ReferenceDataModule
from lit_knn.modules.base import EstimatorTraining

# Number of work arrays of bounded size that an estimator may hold at the same time.
WORK_ARRAYS = 4


def make_plan(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: ReferenceDataModule,
    images: int | None = None,
    image_shape: list[int] | None = None,
    gpu_gb: float | None = None,
    one_step: bool = True,
) -> list[Memory]:
    """Plan a fit, and print what one step took. The arguments are those of `Trainer.plan`."""
    stored = _stored(datamodule, images, image_shape)
    device = trainer.strategy.root_device if gpu_gb is None else torch.device("cuda", 0)
    memories = plan_data(trainer, model, datamodule, stored, device)
    here, machine = memories[0], memories[-1]
    machine.sizes["this process, with the network"] = process_bytes()
    here.sizes["work arrays of estimators, about"] = WORK_ARRAYS * work_bytes(device)
    if gpu_gb is not None:
        # Nothing is known of the machine that has this GPU.
        memories = [here._replace(available=gpu_gb * GB), machine._replace(available=None)]

    if not isinstance(model, EstimatorTraining):
        return memories
    if gpu_gb is None and one_step:
        step = try_step(trainer, model, (datamodule.batch_size, *stored.shape[1:]))
        here.sizes[f"a step of {datamodule.batch_size} images"] = step.peak
        print(f"one step on this machine: peak {step.peak / GB:.3f} GB, {step.seconds:.3g} s")
    else:
        weights = sum(parameter.nbytes for parameter in model.parameters())
        here.sizes["network, gradients, optimiser, average"] = 5 * weights
        here.sizes["activations"] = None
        print("no step is tried: the device is not here, or --one_step is false")
    return memories


def check_fits(
    trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None
) -> None:
    """Refuse a run whose images and arrays of estimators exceed the memory. Only sizes that are known count."""
    if not isinstance(datamodule, ReferenceDataModule):
        return
    try:
        stored = datamodule.stored()
        if stored is None:
            return
        memories = plan_data(trainer, model, datamodule, stored, trainer.strategy.root_device)
    except InputError:
        return  # Loading or binding reports what cannot be read or does not fit the set.

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


def _stored(
    datamodule: ReferenceDataModule, images: int | None, image_shape: list[int] | None
) -> DataLayout:
    """Return size and layout of the images, from the data unless both are given."""
    check_at_least(1, images=1 if images is None else images)
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
