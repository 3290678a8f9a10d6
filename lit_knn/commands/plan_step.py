"""Tries a step of a training on blank images, to measure its memory and its time."""

import ctypes
import gc
import logging
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.data import DataLoader

from lit_knn.common.errors import InputError
from lit_knn.common.lightning_log import lightning_messages
from lit_knn.common.memory import available_bytes, is_out_of_memory, machine_bytes, process_bytes
from lit_knn.estimators import OneSample
from lit_knn.modules.base import EstimatorTraining


class Step(NamedTuple):
    """The memory and the time of one step."""

    peak: int  # largest number of bytes: on a GPU in all, on a CPU in addition to those before the step
    seconds: float


def try_step(trainer: pl.Trainer, model: EstimatorTraining, batch_shape: Sequence[int]) -> Step:
    """Train for two steps on one rank, and return the memory of both and the time of the second.

    There are no callbacks, and no estimator, which would need the data.

    Args:
        trainer: has the device, the precision and the number of batches in a step.
        model: the module, which loses its estimators and is trained.
        batch_shape: shape of a batch, (B, *shape).

    Raises:
        InputError: the memory is too small.
    """
    for name in model.estimators:
        setattr(model, name, OneSample())
    device = trainer.strategy.root_device
    batch = [torch.zeros(*batch_shape), torch.zeros(batch_shape[0], dtype=torch.long)]
    # Two steps: the optimiser makes its state in the first, so only the second has all of the memory.
    count = 2 * trainer.accumulate_grad_batches
    batches: DataLoader[list[Tensor]] = DataLoader([batch] * count, batch_size=None)  # type: ignore[arg-type]

    before = reset_peak(device)
    try:
        with lightning_messages(logging.WARNING), limited_memory(device):
            ends = train(trainer, model, batches)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        advice = "give a smaller --data.batch_size, or --one_step false to see the rest"
        raise InputError(f"one step of {batch_shape[0]} images does not fit: {advice}") from error

    peak = process_bytes("VmHWM") - before
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    end_of_first_step = ends[trainer.accumulate_grad_batches - 1]
    return Step(peak, ends[-1] - end_of_first_step)


def train(trainer: pl.Trainer, model: pl.LightningModule, batches: DataLoader) -> list[float]:
    """Train for two steps on one rank, and return the time at the end of each batch.

    Args:
        trainer: has the options of the training; another trainer does the steps.
        model: the module to train.
        batches: the batches of two steps.
    """
    device = trainer.strategy.root_device
    ends = []

    def note_end(
        trainer: pl.Trainer, model: pl.LightningModule, outputs: dict[str, Tensor], *_: object
    ) -> None:
        outputs["loss"].item()  # Called to wait for the device.
        ends.append(time.perf_counter())

    trial = pl.Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        plugins=[LightningEnvironment()],
        precision=trainer.precision,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        max_steps=2,
        limit_val_batches=0,
        callbacks=[LambdaCallback(on_train_batch_end=note_end)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trial.fit(model, batches, batches)
    return ends


def reset_peak(device: torch.device) -> int:
    """Reset the peak-memory counters, and return the memory that the process uses now, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # Garbage that is collected during the step would make the difference between its peak and this memory too small.
    gc.collect()
    # The C library first gives freed memory back to Linux, which would count it otherwise. Writing "5" into this file
    # then sets the peak of the process to what it uses now. Systems that have neither are left as they are.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return process_bytes()


@contextmanager
def limited_memory(device: torch.device) -> Iterator[None]:
    """Limit the memory on a CPU, so that a step that is too large raises an error.

    Without the limit, the system would kill the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = None
    available = available_bytes()
    if device.type == "cpu" and available is not None:
        limit = min(process_bytes("VmData") + available, machine_bytes() or available)
    resource.setrlimit(resource.RLIMIT_DATA, (limit or soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
