"""The parts of a plan: what the estimators and the network will hold."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.data import ReferenceDataModule, Stored
from lit_knn.errors import InputError
from lit_knn.estimators import KNN, Adaptive, Exact, SubspaceKNN, Wiener
from lit_knn.linalg.dtypes import compute_dtype, is_native
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
    estimators: Sequence[Any], data: ReferenceDataModule, stored: Stored, device: torch.device, ranks: int = 1
) -> tuple[list[Part], list[Part]]:
    """What estimators hold beside the images on `device`, and what the machine holds while they are bound.

    Args:
        estimators: of the run.
        data: its data module.
        stored: the images of one rank.
        device: where the run computes.
        ranks: over which the images are split.
    """
    plain = list(_unwrapped(estimators))
    N, d = stored.shape[0], math.prod(stored.shape[1:])
    # Those of all ranks: each holds all coordinates.
    all_images = ranks * N * (1 + data.hflip)
    held, building = [], []
    if searching := [KNN.k.within(e, all_images, d) for e in plain if isinstance(e, KNN)]:
        index = _index(data)
        index.check(N, d, device, min(max(searching), N))
        shared = index.shared and ranks == 1  # of shards each rank has an index of its own
        size, sample = index.nbytes(N, d, device), index.build_bytes(N, d)
        note = " ".join(str(v) for v in (type(index).__name__, *vars(index).values()) if isinstance(v, str))
        note += "" if size is not None else ": size NOT KNOWN, not counted"
        held.append(Part("index", size or 0, note, shared=shared and device.type == "cpu"))
        # The machine builds it in its own memory, whatever the device.
        built = Part("index", index.nbytes(N, d, torch.device("cpu")) or 0, note, shared=shared)
        building += [built, Part("index training", sample, "until it is built", passing=True, shared=shared)]
    projected = (e for e in plain if isinstance(e, SubspaceKNN))
    for r, dtype in sorted({(SubspaceKNN.r.within(e, all_images, d), _type(e, device)) for e in projected}, key=str):
        size = all_images * (r * dtype.itemsize + 4) + 4 * r * d
        held.append(Part("projection", size, f"{all_images:,} x {r} {str(dtype).removeprefix('torch.')}"))
    for r in sorted({Wiener.r.within(e, all_images, d) for e in plain if isinstance(e, Wiener)}):
        held.append(Part("principal components", 4 * r * d, f"{r}"))
    integers = stored.value_bytes == 1 and is_native(torch.int8, device)
    if integers and any(isinstance(e, Exact) and e.compute != "float64" for e in plain):
        held.append(Part("norms of the images", 4 * N, "of Exact in int8"))
    if any(e.needs_reference for e in plain):
        held.append(Part("work arrays", WORK_ARRAYS * work_bytes(device), "of the estimators, about"))
    return held, building


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


def _unwrapped(estimators: Iterable[Any]) -> Iterable[Any]:
    for estimator in estimators:
        yield estimator
        if isinstance(estimator, Adaptive):
            yield from _unwrapped([estimator.estimator])


def _index(data: ReferenceDataModule) -> Any:
    from lit_knn.index import FaissIndex

    return FaissIndex("Flat") if data.index is None else data.index


def _type(estimator: SubspaceKNN, device: torch.device) -> torch.dtype:
    if device.type == "cuda" and not torch.cuda.is_available():
        # Planned for another machine: what its GPU would multiply.
        return torch.bfloat16 if estimator.compute == "auto" else getattr(torch, estimator.compute)
    return compute_dtype("SubspaceKNN", estimator.compute, device)
