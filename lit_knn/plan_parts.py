"""The parts of a plan: what the estimators and the network will hold."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.data import ReferenceDataModule, Stored
from lit_knn.errors import InputError
from lit_knn.estimators import Estimator
from lit_knn.index import FaissIndex
from lit_knn.memory import saved_bytes, tensor_bytes
from lit_knn.reference.streaming import work_bytes
from lit_knn.training.base import EstimatorTraining

__all__ = ["Part", "Stored", "estimator_parts", "network_parts"]

# Copies of each parameter that an optimiser keeps.
OPTIMISER_STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "RAdam": 2, "NAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1}
MIXED_PRECISIONS = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
# What passes allocate and free again, and the allocator keeps, as a share of the activations kept for backward.
# On a CPU it was 0.6 to 0.7 in three runs; on a GPU it is an allowance.
PASSING_SHARE = {"cpu": 0.6, "cuda": 0.2}
# An estimator has a few arrays of the bounded size at a time.
WORK_ARRAYS = 4


class Part(NamedTuple):
    """One line of a plan.

    Attributes:
        name: what it is.
        bytes: of one rank.
        note: what else there is to say.
        passing: whether it is held only while the run starts.
        shared: whether the ranks of a machine hold it once, together.
    """

    name: str
    bytes: int
    note: str
    passing: bool = False
    shared: bool = False

    def __str__(self) -> str:
        return f"  {self.name:26}{self.bytes / 1e9:8.3f} GB  {self.note}".rstrip()


def estimator_parts(
    estimators: Sequence[Estimator], data: ReferenceDataModule, stored: Stored, device: torch.device, ranks: int = 1
) -> tuple[list[Part], list[Part]]:
    """What estimators hold beside the images on `device`, and what the machine holds while they are bound.

    Args:
        estimators: of the run.
        data: its data module.
        stored: the images of one rank.
        device: where the run computes.
        ranks: over which the images are split.
    """
    N, d = stored.shape[0], math.prod(stored.shape[1:])
    # Those of all ranks: each holds all coordinates.
    all_images, pixels = ranks * N * (1 + data.hflip), stored.value_bytes == 1
    needing = [e for e in estimators if e.needs_reference]
    told = [e.holds(all_images, d, pixels, device) for e in needing]
    # An estimator that does not tell may search.
    neighbours = max((1 if holdings is None else holdings.neighbours for holdings in told), default=0)
    held, building = _index_parts(data, N, d, neighbours, device, ranks) if neighbours else ([], [])
    arrays = {name: size for holdings in told if holdings is not None for name, size in holdings.arrays.items()}
    held += [Part(name, size, "") for name, size in sorted(arrays.items())]
    if needing:
        held.append(Part("work arrays", WORK_ARRAYS * work_bytes(device), "of the estimators, about"))
    for estimator, holdings in zip(needing, told, strict=True):
        if holdings is None:
            held.append(Part(type(estimator).__name__, 0, "does not tell what else it holds: NOT KNOWN, not counted"))
    return held, building


def _index_parts(
    data: ReferenceDataModule, N: int, d: int, neighbours: int, device: torch.device, ranks: int
) -> tuple[list[Part], list[Part]]:
    """The index of N images on `device`, and what the machine holds while it is built."""
    index = FaissIndex("Flat") if data.index is None else data.index
    index.check(N, d, device, min(neighbours, N))
    shared = index.shared and ranks == 1  # of shards each rank has an index of its own
    size, sample = index.nbytes(N, d, device), index.build_bytes(N, d)
    note = " ".join(str(v) for v in (type(index).__name__, *index.settings().values()) if isinstance(v, str))
    note += "" if size is not None else ": size NOT KNOWN, not counted"
    held = Part("index", size or 0, note, shared=shared and device.type == "cpu")
    # The machine builds it in its own memory, whatever the device.
    built = Part("index", index.nbytes(N, d, torch.device("cpu")) or 0, note, shared=shared)
    return [held], [built, Part("index training", sample, "until it is built", passing=True, shared=shared)]


def network_parts(
    model: pl.LightningModule,
    shape: Sequence[int],
    batch_size: int,
    trainer: pl.Trainer,
    device: torch.device | None = None,
) -> list[Part]:
    """The network and what training it takes on `device`; the network alone where nothing is trained."""
    modules = _networks(model)
    count = sum(p.numel() for m in modules for p in m.parameters())
    half = str(trainer.precision) in ("16-true", "bf16-true")
    weights = tensor_bytes(p for m in modules for p in m.parameters()) // (2 if half else 1)
    if not count:
        return []
    parts = [Part("network", weights, f"{count:,} parameters")]
    if not isinstance(model, EstimatorTraining):
        return parts
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradients = trained * (2 if half else 4)
    name, states = _optimiser(model)
    parts.append(Part("gradients", gradients, f"{trained:,} of them trained"))
    parts.append(Part("optimiser", states * gradients, name))
    parts.append(Part("averaged weights", weights, ""))
    if trainer.world_size > 1:
        parts.append(Part("gradient exchange", gradients, "buckets of DDP"))
    kind = "cpu" if device is None or device.type != "cuda" else "cuda"
    activations = _activations(model, shape, batch_size, str(trainer.precision), kind)
    passing = int(PASSING_SHARE[kind] * activations.bytes)
    return [*parts, activations, Part("passing activations", passing, "freed again, about")]


def _activations(model: EstimatorTraining, shape: Sequence[int], batch_size: int, precision: str, kind: str) -> Part:
    def run(trial: Any) -> torch.Tensor:
        z = torch.zeros(batch_size, *shape, device=kind)
        return trial.evaluate_network(z, torch.ones(batch_size, dtype=torch.float64, device=kind))

    try:
        size = saved_bytes(model, run, kind, MIXED_PRECISIONS.get(precision))
    except InputError:
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"plan: the net does not accept images of shape {tuple(shape)}: {reason}") from error
    half = precision.endswith("16-true")
    note = f"kept for the backward pass of {batch_size} images" + (", taken as half of float32" if half else "")
    return Part("activations", size // 2 if half else size, note)


def _optimiser(model: pl.LightningModule) -> tuple[str, int]:
    optimiser = model.configure_optimizers()
    name = type(optimiser).__name__
    known = name in OPTIMISER_STATES
    return name if known else f"{name}: 2 copies assumed", OPTIMISER_STATES.get(name, 2)


def _networks(model: pl.LightningModule) -> list[nn.Module]:
    """The module and networks within an estimator that is measured, not trained."""
    inside = [v for v in vars(getattr(model, "estimator", None) or object).values() if isinstance(v, nn.Module)]
    return [model, *inside]
