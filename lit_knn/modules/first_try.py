"""The time of a training step, from a try that leaves weights, random streams and logs as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.estimators import OneSample
from lit_knn.modules.base import EstimatorTraining
from lit_knn.runs.monitor import TrainingMonitor
from lit_knn.runs.times import duration

# A plan tries larger and larger batches until one takes this long; the time of the whole batch is in proportion.
LONG_ENOUGH_S = 2.0
GROWTH = 4


class StepTime(NamedTuple):
    """Seconds of forward and backward pass of one batch on one rank, and the estimator's part of them."""

    seconds: float
    estimator_seconds: float


def try_step(model: EstimatorTraining, trainer: pl.Trainer, batch: Any) -> StepTime:
    """Compute loss and gradients of a batch as the next training step would, and drop them.

    Ranks exchange no gradients. With a sharded reference set, all ranks must call this.

    Args:
        model: the module, with its estimator bound.
        trainer: its trainer.
        batch: x (B, *shape) or (x, class_label), on the device of the module.
    """
    x, class_label = model._unpack(batch)
    key = (model.hparams.seed, model.global_rank, model.batches_done, Stream.TRAIN)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole, estimator = Stopwatch(x.device), model.monitor.estimator_watch
    estimator.read_and_reset()
    with _without_traces(model), trainer.precision_plugin.train_step_context(), whole.measure():
        # Unlike `backward`, `grad` leaves the gradients of the parameters alone, so DDP starts no exchange.
        loss, _ = model.losses(x, class_label, key)
        torch.autograd.grad(model.checked_objective(loss, x), weights, allow_unused=True)
    return StepTime(whole.read_and_reset(), estimator.read_and_reset())


def planned_step(model: EstimatorTraining, trainer: pl.Trainer, shape: tuple[int, ...], batch_size: int) -> str:
    """Say what a step takes, from steps of blank images. An estimator that needs the data is left out.

    The module is not fit for training afterwards.

    Args:
        model: the module.
        trainer: its trainer.
        shape: shape of one image.
        batch_size: images of a batch on one rank.
    """
    device, left_out = trainer.strategy.root_device, ""
    model.to(device).train()
    model.trainer, model.monitor = trainer, TrainingMonitor(model.grid, device)
    if model.estimator.needs_reference:
        model.estimator = OneSample()
        left_out = ", without the estimator, whose time `fit` tells before its first step"
    try:
        model._set_image_shape(shape)
        seconds, tried = _seconds_of_batch(model, trainer, shape, batch_size)
    except InputError as error:
        return f"The time of a step is NOT KNOWN: {error}"
    seconds *= trainer.accumulate_grad_batches
    images = batch_size * trainer.accumulate_grad_batches * trainer.world_size
    counted = f"{images:,} image{'s' if images > 1 else ''}"
    line = f"A step of {counted} takes about {duration(seconds)} on this {device.type}{left_out}"
    if tried < batch_size:
        line += f" (by a try of {tried} image{'s' if tried > 1 else ''})"
    if trainer.max_steps > 0:
        line += f": {trainer.max_steps:,} steps about {duration(trainer.max_steps * seconds)}"
    return line


def _seconds_of_batch(
    model: EstimatorTraining, trainer: pl.Trainer, shape: tuple[int, ...], batch_size: int
) -> tuple[float, int]:
    """Return the seconds of a batch on one rank, and the images of the try that tells it."""
    size = 1
    device = trainer.strategy.root_device
    while True:
        x = torch.zeros(size, *shape, device=device)
        labels = torch.zeros(size, dtype=torch.int64, device=device)
        # The first try also warms up, and either may be disturbed by other work.
        seconds = min(try_step(model, trainer, (x, labels)).seconds for _ in range(2))
        if size == batch_size or seconds > LONG_ENOUGH_S:
            return seconds * batch_size / size, size
        size = min(GROWTH * size, batch_size)


def is_compiled(model: nn.Module) -> bool:
    """Tell whether `torch.compile` is to compile a part of the module at its first call."""
    compiled = torch._dynamo.eval_frame.OptimizedModule
    return any(isinstance(part, compiled) or part._compiled_call_impl is not None for part in model.modules())


@contextmanager
def _without_traces(model: EstimatorTraining) -> Iterator[None]:
    """Restore the random streams and the buffers of the module, such as those of BatchNorm, and log nothing inside."""
    kept: list[tuple[Tensor, Tensor]] = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.log = _log_nothing  # type: ignore[method-assign]
    try:
        with isolate_rng(include_cuda=model.device.type == "cuda"):
            yield
    finally:
        del model.log
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _log_nothing(*_: Any, **__: Any) -> None:
    pass
