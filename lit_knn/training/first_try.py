"""The time of a training step, from a try that leaves weights, random streams and logs as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn

from lit_knn.stopwatch import Stopwatch
from lit_knn.training.base import TRAIN_STREAM, EstimatorTraining


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
    key = (model.hparams.seed, model.global_rank, model.batches_done, TRAIN_STREAM)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole, estimator = Stopwatch(x.device), model.monitor.estimator_watch
    estimator.read_and_reset()
    with _without_traces(model), trainer.precision_plugin.train_step_context(), whole.measure():
        # Unlike `backward`, `grad` leaves the gradients of the parameters alone, so DDP starts no exchange.
        torch.autograd.grad(model.objective(model.losses(x, class_label, key)[0], x), weights, allow_unused=True)
    return StepTime(whole.read_and_reset(), estimator.read_and_reset())


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
