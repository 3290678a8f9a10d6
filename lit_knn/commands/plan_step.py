"""Tries a step of a training on blank images, and measures its memory and its time."""

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
from lit_knn.common.memory import available_bytes, is_out_of_memory, machine_bytes, process_bytes
from lit_knn.estimators import OneSample
from lit_knn.modules.base import EstimatorTraining


class Step(NamedTuple):
    """The memory and the time of one step."""

    peak: int  # bytes on a GPU; on a CPU, those beyond the process before the step
    seconds: float


def try_step(trainer: pl.Trainer, model: EstimatorTraining, batch_shape: Sequence[int]) -> Step:
    """Train for two steps on one rank, without callbacks and without the estimator, which needs the data.

    Args:
        trainer: has the device, the precision and the number of batches in a step.
        model: the module; it is changed.
        batch_shape: (B, *shape) of a batch.

    Raises:
        InputError: the memory is too small.
    """
    for name in model.estimators:
        setattr(model, name, OneSample())
    device = trainer.strategy.root_device
    batch = [torch.zeros(*batch_shape), torch.zeros(batch_shape[0], dtype=torch.long)]
    # The second step has the state that the optimiser makes in the first.
    count = 2 * trainer.accumulate_grad_batches
    batches: DataLoader[list[Tensor]] = DataLoader([batch] * count, batch_size=None)  # type: ignore[arg-type]

    before = forget_peak(device)
    try:
        with quiet_and_limited(device):
            ends = train(trainer, model, batches)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        advice = "give a smaller --data.batch_size, or --one_step false to see the rest"
        raise InputError(f"one step of {batch_shape[0]} images does not fit: {advice}") from error

    peak = process_bytes("VmHWM") - before
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return Step(peak, ends[-1] - ends[count // 2 - 1])


def train(trainer: pl.Trainer, model: pl.LightningModule, batches: DataLoader) -> list[float]:
    """Train for two steps on one rank. Returns the time at the end of each batch.

    Args:
        trainer: has the options of the training.
        model: the module that it trains.
        batches: those of two steps.
    """
    device = trainer.strategy.root_device
    ends = []

    def note_end(
        trainer: pl.Trainer, model: pl.LightningModule, outputs: dict[str, Tensor], *_: object
    ) -> None:
        outputs["loss"].item()  # This waits for the device.
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


def forget_peak(device: torch.device) -> int:
    """Begin to measure the peak memory, and return the bytes of this process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # Memory that is freed during the step would hide as much of its peak.
    gc.collect()
    # Linux takes back the memory that the process has freed, and then forgets its peak.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return process_bytes()


@contextmanager
def quiet_and_limited(device: torch.device) -> Iterator[None]:
    """Hide Lightning's messages. On a CPU, let allocations fail where the system would end the process."""
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = None
    available = available_bytes()
    if device.type == "cpu" and available is not None:
        limit = min(process_bytes("VmData") + available, machine_bytes() or available)
    logger.setLevel(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_DATA, (limit or soft, hard))
    try:
        yield
    finally:
        logger.setLevel(level)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
