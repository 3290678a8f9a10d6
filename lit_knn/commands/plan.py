"""Predict the memory of a run, except activations, and whether it fits, before the run starts: `lit-knn plan -c …`."""

from collections.abc import Sequence

import pytorch_lightning as pl
import torch

from lit_knn.commands.plan_data import data_parts
from lit_knn.commands.plan_network import estimators_of, network_parts
from lit_knn.commands.plan_table import GB, Need, Part, Plan
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.memory import machine_bytes, process_bytes
from lit_knn.data import DataLayout, ReferenceDataModule

# Memory of a CUDA context with the kernels of PyTorch and its libraries.
CUDA_CONTEXT_BYTES = 600 * 2**20


def make_plan(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: ReferenceDataModule | None,
    images: int | None = None,
    image_shape: list[int] | None = None,
    gpu_gb: float | None = None,
) -> Plan:
    """Plan a fit. The arguments are those of `Trainer.plan`."""
    assert datamodule is not None
    stored = _stored(datamodule, images, image_shape)
    device = trainer.strategy.root_device
    if gpu_gb is not None:
        device = torch.device("cuda", 0)

    held, loading = data_parts(trainer, model, datamodule, stored, device)
    network = network_parts(model, trainer)
    order = Part("order of an epoch", 8 * stored.shape[0] * (1 + datamodule.hflip))
    program = _program(network)

    if device.type == "cpu":
        building = _building(loading, network)
        parts = [*held, order, *network, program, building]
    else:
        parts = [*held, *network, Part("CUDA context", CUDA_CONTEXT_BYTES, "about")]

    host = [*loading, order, program]
    ranks = _ranks_of_machine(trainer)
    if gpu_gb is not None:
        # Nothing is known of the machine that has this GPU.
        return Plan(device, parts, host, gpu_gb * GB, None, ranks, elsewhere=True)
    return Plan(device, parts, host, _device_memory(device), machine_bytes(), ranks)


def check_fits(
    trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule | None
) -> None:
    """Refuse a run whose images and arrays of estimators exceed the memory. Only sizes that are known count."""
    if not isinstance(datamodule, ReferenceDataModule):
        return

    device = trainer.strategy.root_device
    try:
        stored = datamodule.stored()
        if stored is None:
            return
        held, loading = data_parts(trainer, model, datamodule, stored, device)
    except InputError:
        return  # Loading or binding reports what cannot be read or does not fit the set.

    parts = [part for part in held if not part.estimated]
    host = [part for part in loading if not part.temporary]
    ranks = _ranks_of_machine(trainer)
    plan = Plan(device, parts, host, _device_memory(device), machine_bytes(), ranks)

    # On a CPU there is one need, that of the first parts.
    for counted, need in zip((parts, host), plan.needed, strict=False):
        if not need.fits:
            names = [type(estimator).__name__ for estimator in estimators_of(trainer, model)]
            owners = names or [type(datamodule).__name__]
            raise _too_large(owners, counted, need, ranks)


def _too_large(owners: Sequence[str], parts: Sequence[Part], need: Need, ranks: int) -> InputError:
    """Return the error that the parts of a set do not fit into a memory."""
    sizes = ", ".join(f"{part.name} {part.bytes / GB:.4g} GB" for part in parts if part.bytes)
    problem = f"the set does not fit: {sizes} for each of {ranks} rank(s)"
    names = ", ".join(dict.fromkeys(owners))

    assert need.available is not None
    limit = f"more than the {need.available / GB:.4g} GB of {need.memory}"
    return InputError(f"{names}: {problem}, {limit}; `plan` shows what a run needs")


def _stored(
    datamodule: ReferenceDataModule, images: int | None, image_shape: list[int] | None
) -> DataLayout:
    """Return size and layout of the images, from the data unless both are given."""
    if images is not None:
        check_at_least(1, images=images)
    if image_shape:
        check_at_least(1, image_shape=min(image_shape))
    if images is not None and image_shape is not None:
        return DataLayout((images, *image_shape), mapped=datamodule.mapped)

    missing = "give --images and --image_shape"
    try:
        stored = datamodule.stored()
    except InputError as error:
        raise InputError(f"plan: {error}; without the data {missing}") from error
    if stored is None:
        problem = f"{type(datamodule).__name__} does not tell its size"
        raise InputError(f"plan: {problem}; {missing}")

    N = images or stored.shape[0]
    shape = image_shape or stored.shape[1:]
    return stored._replace(shape=(N, *shape))


def _program(network: Sequence[Part]) -> Part:
    """Return what this process holds now. It holds the network already, whose part counts that."""
    held = process_bytes()
    if network:
        held -= network[0].bytes
    return Part("program", max(held, 0), "Python, PyTorch, Lightning: this process now")


def _building(loading: Sequence[Part], network: Sequence[Part]) -> Part:
    """Return by how much the building of the index exceeds the needs of training.

    The index is built before there are gradients, so only the excess counts.
    """
    building = sum(part.bytes for part in loading if part.temporary)
    training = sum(part.bytes for part in network[1:])
    excess = max(building - training, 0)
    return Part("building the index", excess, "beyond what training needs later")


def _ranks_of_machine(trainer: pl.Trainer) -> int:
    """Return the number of processes that share a machine."""
    return trainer.world_size // trainer.num_nodes


def _device_memory(device: torch.device) -> float | None:
    """Return the bytes of memory of a GPU; None for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return None
