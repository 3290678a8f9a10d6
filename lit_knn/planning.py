"""What a run will hold in memory, and whether it fits, before it starts: `python main.py plan -c …`."""

import math
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from lit_knn.data import ReferenceDataModule
from lit_knn.errors import InputError
from lit_knn.memory import machine_bytes, process_bytes
from lit_knn.plan_parts import Part, Stored, estimator_parts, network_parts

# Of a CUDA context with the kernels of PyTorch and its libraries.
CUDA_CONTEXT_BYTES = 600 * 2**20
GB = 1e9


class Plan(NamedTuple):
    """The memory of one rank.

    Attributes:
        device: where the run computes.
        parts: what is held there.
        host: what a run on a GPU holds in the memory of the machine while it starts.
        device_memory: what the device has, None if not known.
        host_memory: what the machine has, None if not known.
        ranks: processes that share the machine.
        elsewhere: whether the device is of another machine, described by the user.
    """

    device: torch.device
    parts: list[Part]
    host: list[Part]
    device_memory: float | None
    host_memory: float | None
    ranks: int
    elsewhere: bool = False

    @property
    def total(self) -> int:
        """Bytes of one rank on its device."""
        return sum(part.bytes for part in self.parts)

    @property
    def needed(self) -> list[tuple[str, float, float | None]]:
        """Name, bytes needed and bytes there of each memory."""
        if self.device.type == "cpu":
            return [("the machine", self._of_all_ranks(self.parts), self.host_memory)]
        host = self._of_all_ranks(self.host)
        return [("each device", self.total, self.device_memory), ("the machine", host, self.host_memory)]

    def _of_all_ranks(self, parts: list[Part]) -> int:
        return sum(part.bytes * (1 if part.shared else self.ranks) for part in parts)

    @property
    def fits(self) -> bool:
        """Whether everything fits, as far as that is known."""
        return all(there is None or needed <= there for _, needed, there in self.needed)

    def __str__(self) -> str:
        given = f"a GPU of {(self.device_memory or 0) / GB:g} GB that is given, not found here"
        lines = [f"Each of {self.ranks} rank(s) of a machine, on {given if self.elsewhere else self.device.type}:"]
        lines += [str(part) for part in self.parts]
        lines.append(f"  {'total':26}{self.total / GB:8.3f} GB")
        if self.device.type != "cpu":
            lines += ["  and in the memory of the machine, until it is on the device:", *map(str, self.host)]
        for name, needed, there in self.needed:
            has = "whose memory is not known" if there is None else f"which has {there / GB:.2f} GB"
            verdict = "" if there is None else (": fits" if needed <= there else ": DOES NOT FIT")
            lines.append(f"{needed / GB:.2f} GB on {name}, {has}{verdict}")
        return "\n".join(lines)


def make_plan(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: ReferenceDataModule | None,
    images: int | None = None,
    image_shape: list[int] | None = None,
    gpu_gb: float | None = None,
    machine_gb: float | None = None,
) -> Plan:
    """The plan of a fit; arguments as `Trainer.plan`."""
    given = {"images": images, "image_shape": min(image_shape or [1]), "gpu_gb": gpu_gb, "machine_gb": machine_gb}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise InputError(f"plan: {name} must be above 0, got {value}")
    device = trainer.strategy.root_device if gpu_gb is None else torch.device("cuda", 0)
    assert datamodule is not None
    stored = _stored(datamodule, images, image_shape)
    N = stored.shape[0]
    parts_of_data = trainer.world_size if datamodule.sharded else 1
    stored = stored._replace(shape=(-(-N // parts_of_data), *stored.shape[1:]))
    base = process_bytes()  # before anything is copied to be measured
    network = network_parts(model, stored.shape[1:], datamodule.batch_size, trainer, device)
    base -= network[0].bytes if network else 0
    estimators = _estimators(trainer, model)
    held, building = estimator_parts(estimators, datamodule, stored, device, parts_of_data)
    size = math.prod(stored.shape)
    if getattr(model, "conditioning", None) and not stored.by_class and any(e.needs_reference for e in estimators):
        held.insert(0, Part("images by class", size * stored.value_bytes, "copies; none of data sorted by class"))
    place = "mapped from the disk, shared, given up when short" if stored.mapped else "in memory"
    loaded = Part("images", 0 if stored.mapped else size * stored.value_bytes, f"{_shape(stored)}, {place}")
    on_device = Part("images", size * stored.value_bytes, f"{_shape(stored)}, copied to the device")
    if datamodule.sharded and not stored.mapped:
        others = (N - stored.shape[0]) * math.prod(stored.shape[1:]) * stored.value_bytes
        building.append(Part("images of others", others, "until this rank has chosen its share", passing=True))
    order = Part("order of an epoch", 8 * N * (1 + datamodule.hflip), "")
    program = Part("program", max(base, 0), "Python, PyTorch, Lightning: this process now")
    host = [loaded, order, *building, program]
    gpu = device.type != "cpu"
    context = Part("CUDA context", CUDA_CONTEXT_BYTES, "about")
    parts = [on_device, *held, *network, context] if gpu else [loaded, order, *held, *network, program]
    if not gpu:
        # The index is built before there are gradients and activations: only what is more than these counts.
        later = sum(part.bytes for part in network[1:])
        sample = sum(part.bytes for part in building if part.passing)
        parts.append(Part("building the index", max(sample - later, 0), "beyond what training needs later"))
    ranks = trainer.world_size // trainer.num_nodes
    this = machine_bytes() if gpu_gb is None else None
    machine = this if machine_gb is None else machine_gb * GB
    return Plan(device, parts, host, _device_memory(device, gpu_gb), machine, ranks, gpu_gb is not None)


def _stored(datamodule: ReferenceDataModule, images: int | None, image_shape: list[int] | None) -> Stored:
    try:
        known = None if images is not None and image_shape is not None else datamodule.stored()
    except InputError as error:
        raise InputError(f"plan: {error}; without the data give --images and --image_shape") from error
    if known is None and (images is None or image_shape is None):
        raise InputError(
            f"plan: {type(datamodule).__name__} does not tell its size before it is loaded; give --images and "
            "--image_shape"
        )
    shape = (images or known.shape[0], *(image_shape or known.shape[1:]))  # type: ignore[union-attr]
    return Stored(shape, mapped=datamodule.mapped) if known is None else known._replace(shape=shape)


def _shape(stored: Stored) -> str:
    N, *shape = stored.shape
    kind = "uint8" if stored.value_bytes == 1 else "float32"
    return f"{N:,} x {'x'.join(map(str, shape))} {kind}"


def _estimators(trainer: pl.Trainer, model: pl.LightningModule) -> list[Any]:
    """Those of the model and of callbacks that measure some."""
    measured = [getattr(callback, "estimators", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    ofcallbacks = [e for found in measured if isinstance(found, dict) for e in found.values()]
    return [e for e in (getattr(model, "estimator", None), *ofcallbacks) if e is not None]


def _device_memory(device: torch.device, gpu_gb: float | None) -> float | None:
    if gpu_gb is not None:
        return gpu_gb * GB
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
