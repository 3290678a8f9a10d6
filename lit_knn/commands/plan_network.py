"""Plans the memory of the network and of its training, except activations."""

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
from torch import nn

from lit_knn.commands.plan_table import Part
from lit_knn.estimators import Estimator
from lit_knn.modules.base import EstimatorTraining

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


def network_parts(model: pl.LightningModule, trainer: pl.Trainer) -> list[Part]:
    """Plan the networks, and what the training of the model adds; return an empty list for none."""
    count = 0
    weights = 0
    for module in _modules(model, trainer):
        for parameter in module.parameters():
            count += parameter.numel()
            weights += parameter.nbytes
    if not count:
        return []

    parts = [Part("network", weights, f"{count:,} parameters")]
    if isinstance(model, EstimatorTraining):
        parts += _training_parts(model, trainer)
    return parts


def estimators_of(trainer: pl.Trainer, model: pl.LightningModule) -> list[Estimator]:
    """Return the estimators of the model and of the callbacks that measure estimators."""
    candidates: list[Any] = []
    for part in (model, *trainer.callbacks):  # type: ignore[attr-defined]
        named = getattr(part, "estimators", None)
        if isinstance(named, dict):
            candidates += named.values()
        candidates.append(getattr(part, "network", None))
    return [candidate for candidate in candidates if isinstance(candidate, Estimator)]


def _modules(model: pl.LightningModule, trainer: pl.Trainer) -> list[nn.Module]:
    """Return the model, and the networks inside estimators, which are measured, not trained."""
    modules: list[nn.Module] = [model]
    for estimator in estimators_of(trainer, model):
        for value in _attributes(estimator):
            if isinstance(value, nn.Module):
                modules.append(value)
    return modules


def _attributes(estimator: Estimator) -> Iterator[Any]:
    """Yield the attributes of an estimator, and those of estimators inside it."""
    for value in vars(estimator).values():
        yield value
        if isinstance(value, Estimator):
            yield from _attributes(value)


def _training_parts(model: EstimatorTraining, trainer: pl.Trainer) -> list[Part]:
    """Plan what a training holds besides the network: gradients, optimiser and averages."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    gradients = 4 * trained  # in float32

    optimiser = _optimiser_name(model)
    note = optimiser if optimiser in OPTIMISER_STATES else f"{optimiser}: 2 copies assumed"
    parts = [
        Part("gradients", gradients, f"{trained:,} of them trained"),
        Part("optimiser", OPTIMISER_STATES.get(optimiser, 2) * gradients, note),
        Part("averaged weights", weights),
    ]

    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    lengths = sum(getattr(callback, "copies_of_weights", 0) for callback in callbacks)
    if lengths:
        parts.append(Part("power-function averages", lengths * weights, f"{lengths} lengths"))
    if trainer.world_size > 1:
        parts.append(Part("gradient exchange", gradients, "buckets of DDP"))
    return parts


def _optimiser_name(model: pl.LightningModule) -> str:
    """Return the class name of the model's optimiser; with a schedule the model returns both."""
    optimiser: Any = model.configure_optimizers()
    if isinstance(optimiser, dict):
        optimiser = optimiser["optimizer"]
    return type(optimiser).__name__
