"""Helpers for modules and callbacks: the data and the callbacks of a run."""

from typing import TypeVar

import pytorch_lightning as pl
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.data.autoencoders import Autoencoder
from lit_knn.reference import ReferenceSet

CallbackT = TypeVar("CallbackT", bound=pl.Callback)


def find_callback(trainer: pl.Trainer, kind: type[CallbackT]) -> CallbackT | None:
    """Return the first callback of a class, or None if the run has none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kind):
            return callback
    return None


def find_reference(trainer: pl.Trainer) -> ReferenceSet | None:
    """Return the reference set of the run's data module, or None if the data module has none."""
    return getattr(getattr(trainer, "datamodule", None), "reference", None)


def data_reference(trainer: pl.Trainer, may_be_sharded: bool = False) -> ReferenceSet:
    """Return the reference set of the run's data module, which is set up before callbacks and modules.

    Args:
        trainer: the trainer of the run.
        may_be_sharded: accept a sharded set. All ranks must then make the same calls of its methods.

    Raises:
        InputError: the data module has no reference set, or only a sharded one.
    """
    reference = find_reference(trainer)
    if reference is None:
        raise InputError("the data has no reference set; use a data module of lit_knn.data")
    if reference.sharded and not may_be_sharded:
        raise InputError("all images are needed on each device: set data.sharded to false")
    return reference


def data_autoencoder(trainer: pl.Trainer) -> Autoencoder | None:
    """Return the autoencoder of the run's data, or None if its images are not encoded."""
    return getattr(getattr(trainer, "datamodule", None), "autoencoder", None)


def decoded(trainer: pl.Trainer, samples: Tensor) -> Tensor:
    """Return samples, (B, *shape), decoded by the autoencoder of the run's data, or as they are without one."""
    autoencoder = data_autoencoder(trainer)
    if autoencoder is None:
        return samples
    with torch.no_grad():
        return autoencoder.decode(samples.float()).to(samples.device, torch.float32)
