"""Helpers for callbacks: they use a run's data, seed, folder, ranks and progress bar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from tqdm import tqdm

from lit_knn.common.distributed import broadcast
from lit_knn.common.errors import InputError, first_line
from lit_knn.common.progress import progress_bar
from lit_knn.data.autoencoders import Autoencoder
from lit_knn.reference import ReferenceSet


def find_reference(trainer: pl.Trainer) -> ReferenceSet | None:
    """Return the reference set of the run's data module, or None if the data module has none."""
    return getattr(getattr(trainer, "datamodule", None), "reference", None)


def data_reference(owner: str, trainer: pl.Trainer, may_be_sharded: bool = False) -> ReferenceSet:
    """Return the reference set of the run's data module. Lightning sets up the data module before callbacks.

    Args:
        owner: the callback that asks.
        trainer: the run's trainer.
        may_be_sharded: accept a sharded set; every rank must then call the set the same number of times.

    Raises:
        InputError: the run's data is not from `lit_knn.data`, or it is sharded without `may_be_sharded`.
    """
    reference = find_reference(trainer)
    if reference is None:
        raise InputError(f"{owner}: the data has no reference set; use a data module of lit_knn.data")
    if reference.sharded and not may_be_sharded:
        raise InputError(f"{owner} needs all images on each device: set data.sharded to false")
    return reference


def held_out_reference(trainer: pl.Trainer) -> ReferenceSet | None:
    """Return the images that the run's data module holds out of its reference set, or None if there are none."""
    return getattr(getattr(trainer, "datamodule", None), "held_out_reference", None)


def compared_reference(owner: str, trainer: pl.Trainer, held_out: bool, may_be_sharded: bool = False) -> ReferenceSet:
    """Return the real images that samples are compared with: `data_reference`, or the held-out images.

    Raises:
        InputError: as `data_reference`; with `held_out`, the data module holds no images out.
    """
    reference = data_reference(owner, trainer, may_be_sharded)
    if not held_out:
        return reference
    kept = held_out_reference(trainer)
    if kept is None:
        raise InputError(f"{owner}: held_out=true, but the data holds no images out: set data.held_out to their number")
    return kept


def image_reference(owner: str, trainer: pl.Trainer, held_out: bool, may_be_sharded: bool = False) -> ReferenceSet:
    """Return the real images that decoded samples are compared with: `compared_reference`, if nothing is encoded."""
    reference = compared_reference(owner, trainer, held_out, may_be_sharded)
    name = "held_out_image_reference" if held_out else "image_reference"
    images = getattr(getattr(trainer, "datamodule", None), name, None)
    return reference if images is None else images


def data_autoencoder(trainer: pl.Trainer) -> Autoencoder | None:
    """Return the autoencoder of the run's data, or None if its images are not encoded."""
    return getattr(getattr(trainer, "datamodule", None), "autoencoder", None)


def decoded(trainer: pl.Trainer, samples: Tensor) -> Tensor:
    """Decode samples (B, *shape) to images by the autoencoder of the run's data; without one return them as they are.

    Raises:
        InputError: `decode` returns no tensor of one image for each sample.
    """
    autoencoder = data_autoencoder(trainer)
    if autoencoder is None:
        return samples
    with torch.no_grad():
        images = autoencoder.decode(samples.float())
    if not isinstance(images, Tensor) or len(images) != len(samples):
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise InputError(f"{type(autoencoder).__name__}: decode must return {len(samples)} images, got {got}")
    return images.to(samples.device, torch.float32)


def run_seed(pl_module: pl.LightningModule) -> int:
    """Return the seed of the run, which is the option `--seed_everything`."""
    hparams: Any = pl_module.hparams
    return int(hparams.seed)


def check_stage(owner: str, stage: str) -> None:
    """Refuse to measure in `fit`: each validation would overwrite the results of the last one."""
    if stage == "fit":
        raise InputError(f"{owner} is for validate, not for fit")


def check_new(owner: str, trainer: pl.Trainer, *names: str) -> None:
    """Raise InputError if the run's folder has one of these files from an earlier run; all ranks must call it."""
    folder = trainer.log_dir
    taken = next((name for name in names if folder and (Path(folder) / name).exists()), None)
    taken = broadcast(taken)  # all ranks stop if the first one does
    if taken is not None:
        raise InputError(f"{owner}: {Path(str(folder)) / taken} exists; nothing is overwritten, use another folder")


def make_folder(folder: Path) -> None:
    """Make a folder of checkpoints; raise InputError if it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: no folder of checkpoints can be made: {first_line(error)}") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder}: checkpoints cannot be written there")


def is_end_of_training(trainer: pl.Trainer) -> bool:
    """Tell whether this step is the last one that the options ask for."""
    last_batch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or last_batch


def measuring_bar(trainer: pl.Trainer, total: int | None, description: str, unit: str, leave: bool = False) -> tqdm:
    """Make a `progress_bar`; it is shown unless the run's bars are off."""
    return progress_bar(total, description, unit, leave, shown=trainer.progress_bar_callback is not None)
