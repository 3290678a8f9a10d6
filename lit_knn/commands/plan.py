"""Predict the memory of a run, except activations, and whether it fits, before the run starts: `lit-knn plan -c …`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.memory import machine_bytes, process_bytes, work_bytes
from lit_knn.data import ReferenceDataModule, Stored
from lit_knn.estimators import Estimator, Holdings
from lit_knn.index import Index, default_index
from lit_knn.index.base import Vectors
from lit_knn.modules.base import EstimatorTraining

# Memory of a CUDA context with the kernels of PyTorch and its libraries.
CUDA_CONTEXT_BYTES = 600 * 2**20
GB = 1e9
# Number of copies of each parameter that the state of an optimiser holds.
OPTIMISER_STATES = {
    "SGD": 0,
    "Adam": 2,
    "AdamW": 2,
    "RAdam": 2,
    "NAdam": 2,
    "Adamax": 2,
    "RMSprop": 1,
    "Adagrad": 1,
}
# Number of work arrays of bounded size that an estimator may hold at the same time.
WORK_ARRAYS = 4


@dataclass(frozen=True)
class Part:
    """One line of a plan: what takes the memory, the bytes on one rank, and further information."""

    name: str
    bytes: int
    note: str = ""
    temporary: bool = False  # needed only while the run starts
    shared: bool = False  # the ranks of a machine share one copy
    counted: bool = True  # the size is known; otherwise `bytes` is 0
    estimated: bool = False  # the size is a guess

    def __str__(self) -> str:
        return f"  {self.name:26}{self.bytes / GB:8.3f} GB  {self.note}".rstrip()


@dataclass(frozen=True)
class Plan:
    """The planned memory of one rank; unknown memories are None."""

    device: torch.device
    parts: list[Part]  # on the device
    host: list[Part]  # what a run on a GPU holds in the machine's memory while it starts
    device_memory: float | None
    host_memory: float | None
    ranks: int  # processes that share the machine
    elsewhere: bool = False  # the device belongs to another machine, as the user described it

    @property
    def total(self) -> int:
        """Total bytes of one rank on its device."""
        return sum(part.bytes for part in self.parts)

    @property
    def needed(self) -> list[tuple[str, float, float | None]]:
        """For each memory: its name, the bytes needed and the bytes available."""
        on_cpu = self.device.type == "cpu"
        # The ranks of a machine hold each shared part once.
        held = sum(
            p.bytes * (1 if p.shared else self.ranks) for p in (self.parts if on_cpu else self.host)
        )
        machine = ("the machine", held, self.host_memory)
        return [machine] if on_cpu else [("each device", self.total, self.device_memory), machine]

    @property
    def fits(self) -> bool:
        """Whether everything fits, as far as it is known."""
        return all(there is None or needed <= there for _, needed, there in self.needed)

    def __str__(self) -> str:
        given = f"a GPU of {(self.device_memory or 0) / GB:g} GB that is given, not found here"
        lines = [
            f"Each of {self.ranks} rank(s) of a machine, on {given if self.elsewhere else self.device.type}:"
        ]
        lines += [*map(str, self.parts), str(Part("total", self.total))]
        if self.device.type != "cpu":
            lines += [
                "  and in the memory of the machine, until it is on the device:",
                *map(str, self.host),
            ]
        lines.append("Not counted: activations of the network, which grow with the batch.")
        fits = (
            "fits"
            if all(part.counted for part in self.parts)
            else "fits, apart from what is NOT KNOWN"
        )
        for name, needed, there in self.needed:
            if there is None:
                verdict = "whose memory is not known"
            else:
                verdict = (
                    f"which has {there / GB:.2f} GB: {fits if needed <= there else 'DOES NOT FIT'}"
                )
            lines.append(f"{needed / GB:.2f} GB on {name}, {verdict}")
        return "\n".join(lines)


def make_plan(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: ReferenceDataModule | None,
    images: int | None = None,
    image_shape: list[int] | None = None,
    gpu_gb: float | None = None,
) -> Plan:
    """Plan a fit. The arguments are those of `Trainer.plan`."""
    device = trainer.strategy.root_device if gpu_gb is None else torch.device("cuda", 0)
    assert datamodule is not None
    stored = _stored(datamodule, images, image_shape)
    held, loading = data_parts(trainer, model, datamodule, stored, device)
    network = network_parts(model, trainer)
    order = Part("order of an epoch", 8 * stored.shape[0] * (1 + datamodule.hflip))
    # This process holds the network already.
    base = process_bytes() - (network[0].bytes if network else 0)
    program = Part("program", max(base, 0), "Python, PyTorch, Lightning: this process now")
    if device.type == "cpu":
        # The index is built before there are gradients, so only the excess over the needs of training counts.
        excess = sum(part.bytes for part in loading if part.temporary) - sum(
            part.bytes for part in network[1:]
        )
        building = Part("building the index", max(excess, 0), "beyond what training needs later")
        parts = [*held, order, *network, program, building]
    else:
        parts = [*held, *network, Part("CUDA context", CUDA_CONTEXT_BYTES, "about")]
    elsewhere, ranks = gpu_gb is not None, trainer.world_size // trainer.num_nodes
    of_machine = None if elsewhere else machine_bytes()
    of_device = device_memory(device) if gpu_gb is None else gpu_gb * GB
    return Plan(device, parts, [*loading, order, program], of_device, of_machine, ranks, elsewhere)


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
    ranks = trainer.world_size // trainer.num_nodes
    plan = Plan(device, parts, host, device_memory(device), machine_bytes(), ranks)
    for counted, (where, needed, there) in zip((parts, host), plan.needed, strict=False):
        if there is not None and needed > there:
            told = ", ".join(
                f"{part.name} {part.bytes / GB:.4g} GB" for part in counted if part.bytes
            )
            owners = [type(e).__name__ for e in estimators_of(trainer, model)] or [
                type(datamodule).__name__
            ]
            told = f"{', '.join(dict.fromkeys(owners))}: the set does not fit: {told} for each of {ranks} rank(s)"
            raise InputError(
                f"{told}, more than the {there / GB:.4g} GB of {where}; `plan` shows what a run needs"
            )


class NotBuilt(Index):
    """Stands for an index that a plan does not build: it checks settings, and finds the first images."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        self.index.check(N, d, device, k)

    def build(self, vectors: Vectors) -> None:
        pass

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return queries.new_zeros(len(queries), k), torch.arange(k, device=queries.device).expand(
            len(queries), k
        )

    def to(self, device: torch.device) -> None:
        pass


def _stored(
    datamodule: ReferenceDataModule, images: int | None, image_shape: list[int] | None
) -> Stored:
    """Return size and layout of the images, from the data unless both are given."""
    check_at_least(1, images=1 if images is None else images, image_shape=min(image_shape or [1]))
    if images is not None and image_shape is not None:
        return Stored((images, *image_shape), mapped=datamodule.mapped)
    try:
        stored = datamodule.stored()
    except InputError as error:
        raise InputError(
            f"plan: {error}; without the data give --images and --image_shape"
        ) from error
    if stored is None:
        raise InputError(
            f"plan: {type(datamodule).__name__} does not tell its size; give --images and --image_shape"
        )
    return stored._replace(shape=(images or stored.shape[0], *(image_shape or stored.shape[1:])))


def data_parts(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    datamodule: ReferenceDataModule,
    stored: Stored,
    device: torch.device,
) -> tuple[list[Part], list[Part]]:
    """Plan the images and the estimators of one rank: on `device`, and on the machine until they are on it."""
    total, *shape = stored.shape
    ranks = trainer.world_size if datamodule.sharded else 1
    held_out, train_images = datamodule.held_out, datamodule.train_images
    N = total - held_out if train_images is None else train_images
    own = stored._replace(shape=(-(-N // ranks), *shape))
    image_bytes = math.prod(shape) * own.value_bytes
    what = f"{own.shape[0]:,} x {'x'.join(map(str, shape))} {'uint8' if own.value_bytes == 1 else 'float32'}"
    size = (own.shape[0] + held_out) * image_bytes
    where = "mapped from the disk, shared, given up when short" if own.mapped else "in memory"
    loaded = Part("images", 0 if own.mapped else size, f"{what}, {where}")
    estimators = estimators_of(trainer, model)
    held, building = estimator_parts(estimators, datamodule, own, device, ranks)
    if (
        getattr(model, "conditioning", None)
        and not own.by_class
        and any(e.needs_reference for e in estimators)
    ):
        held.insert(
            0, Part("images by class", size, "copies, which data sorted by class do not need")
        )
    if not own.mapped and (others := total * image_bytes - size):
        building.append(
            Part("other images", others, "until this rank has chosen its own", temporary=True)
        )
    on_device = (
        loaded if device.type == "cpu" else Part("images", size, f"{what}, copied to the device")
    )
    return [on_device, *held], [loaded, *building]


def estimators_of(trainer: pl.Trainer, model: pl.LightningModule) -> list[Any]:
    """Return the estimators of the model and of the callbacks that measure estimators."""
    found: list[Any] = []
    for part in (model, *trainer.callbacks):  # type: ignore[attr-defined]
        own = getattr(part, "estimators", None)
        found += [*(own.values() if isinstance(own, dict) else ()), getattr(part, "network", None)]
    return [estimator for estimator in found if isinstance(estimator, Estimator)]


def device_memory(device: torch.device) -> float | None:
    """Return the bytes of memory of a GPU; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def estimator_parts(
    estimators: Sequence[Estimator],
    data: ReferenceDataModule,
    stored: Stored,
    device: torch.device,
    ranks: int = 1,
) -> tuple[list[Part], list[Part]]:
    """Plan the memory of estimators besides the images of one rank: on `device`, and on the machine until bound."""
    N, d = stored.shape[0], math.prod(stored.shape[1:])
    # Each rank holds the coordinates of the images of all ranks.
    all_images, pixels = ranks * N * (1 + data.hflip), stored.value_bytes == 1
    neighbours, indexes, arrays, unknown = 0, 1, dict[str, int](), []
    for estimator in estimators:
        own, name = estimator.holds(all_images, d, pixels, device), type(estimator).__name__
        if own is None:
            unknown.append(
                Part(
                    name,
                    0,
                    "does not tell what else it holds: NOT KNOWN, not counted",
                    counted=False,
                )
            )
            own = Holdings(neighbours=1)  # The estimator may search for neighbours.
        if estimator.needs_reference:
            neighbours, indexes = max(neighbours, own.neighbours), max(indexes, own.indexes)
        for array, size in own.arrays.items():
            arrays[array] = max(size, arrays.get(array, 0))
    held, building = (
        _index_parts(data, N, d, neighbours, device, ranks, pixels) if neighbours else ([], [])
    )
    held, building = indexes * held, indexes * building
    held += [Part(array, size) for array, size in sorted(arrays.items())]
    if any(estimator.needs_reference for estimator in estimators):
        held.append(
            Part(
                "work arrays",
                WORK_ARRAYS * work_bytes(device),
                "of the estimators, about",
                estimated=True,
            )
        )
    return [*held, *unknown], building


def _index_parts(
    data: ReferenceDataModule,
    N: int,
    d: int,
    neighbours: int,
    device: torch.device,
    ranks: int,
    pixels: bool,
) -> tuple[list[Part], list[Part]]:
    """Plan the index of N images on `device`, and the machine's memory during its build."""
    index = default_index(device, pixels) if data.index is None else data.index
    index.check(N, d, device, min(neighbours, N))
    shared = index.shared and ranks == 1  # With shards, each rank has its own index.
    size, sample = index.nbytes(N, d, device), index.build_bytes(N, d)
    words = [
        value
        for name, value in index.settings().items()
        if isinstance(value, str) and name != "cache_dir"
    ]
    note = " ".join([type(index).__name__, *words])
    note += "" if size is not None else ": size NOT KNOWN, not counted"
    held = Part(
        "index", size or 0, note, shared=shared and device.type == "cpu", counted=size is not None
    )
    # Some indexes are built in the memory of the machine, whatever the device.
    if index.built_on_cpu or device.type == "cpu":
        built = Part("index", index.nbytes(N, d, torch.device("cpu")) or 0, note, shared=shared)
    else:
        built = Part("index", 0, f"{note}, built on the device")
    return [held], [
        built,
        Part("index training", sample, "until it is built", temporary=True, shared=shared),
    ]


def network_parts(model: pl.LightningModule, trainer: pl.Trainer) -> list[Part]:
    """Plan the network and the needs of its training, except activations. Without training, plan only the network."""
    # The networks inside estimators are measured, not trained.
    held = [
        value for estimator in estimators_of(trainer, model) for value in _attributes(estimator)
    ]
    modules = [model, *(value for value in held if isinstance(value, nn.Module))]
    count = sum(p.numel() for m in modules for p in m.parameters())
    weights = sum(p.nbytes for m in modules for p in m.parameters())
    own = sum(p.nbytes for p in model.parameters())
    if not count:
        return []
    parts = [Part("network", weights, f"{count:,} parameters")]
    if not isinstance(model, EstimatorTraining):
        return parts
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradients = 4 * trained
    made: Any = model.configure_optimizers()
    optimiser = type(made["optimizer"] if isinstance(made, dict) else made).__name__
    note = optimiser if optimiser in OPTIMISER_STATES else f"{optimiser}: 2 copies assumed"
    parts.append(Part("gradients", gradients, f"{trained:,} of them trained"))
    parts.append(Part("optimiser", OPTIMISER_STATES.get(optimiser, 2) * gradients, note))
    parts.append(Part("averaged weights", own))
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    lengths = sum(getattr(callback, "copies_of_weights", 0) for callback in callbacks)
    if lengths:
        parts.append(Part("power-function averages", lengths * own, f"{lengths} lengths"))
    if trainer.world_size > 1:
        parts.append(Part("gradient exchange", gradients, "buckets of DDP"))
    return parts


def _attributes(estimator: Estimator) -> Iterator[Any]:
    """Yield the attributes of an estimator, and those of estimators inside it."""
    for value in vars(estimator).values():
        yield value
        if isinstance(value, Estimator):
            yield from _attributes(value)
