"""Ends a training whose loss is not finite, before a checkpoint is spoilt."""

import pytorch_lightning as pl
from torch import Tensor

from lit_knn.common.deferred_checks import DeferredChecks, refuse
from lit_knn.common.errors import NonFiniteLossError
from lit_knn.runs.steps import IntervalCallback


def check_finite(loss: Tensor, t: Tensor, step: int) -> None:
    """Raise NonFiniteLossError for a loss that is not finite: at once on the CPU, and later on a GPU, see `refuse`.

    Args:
        loss: (B,).
        t: the noise levels of the items, (B,), for the message.
        step: the optimiser step, for the message.
    """
    bad = ~loss.isfinite()

    def first_level() -> Tensor:
        return t.index_select(0, bad.int().argmax(0, keepdim=True))

    def failure(check: int, level: float, where: str) -> NonFiniteLossError:
        place = where or f" at step {step}"
        problem = f"the loss is not finite{place}, first at noise level t={level:.4g}"
        return NonFiniteLossError(f"{problem}; the last checkpoint is from before it")

    refuse("loss", bad.any().reshape(1), first_level, failure)


def check_samples(samples: Tensor, step: int) -> None:
    """Raise NonFiniteLossError for samples (B, *shape) of a training that are not finite; see `check_finite`."""
    bad = ~samples.detach().isfinite().all().reshape(1)

    def failure(check: int, value: float, where: str) -> NonFiniteLossError:
        problem = f"the samples are not finite{where or f' at step {step}'}"
        return NonFiniteLossError(f"{problem}; the last checkpoint is from before it")

    refuse("samples", bad, bad.double, failure)


class FiniteLoss(IntervalCallback):
    """Raises the errors that the checks have noted on a GPU: at each log, before a validation, and at the end.

    The module itself raises them before a checkpoint is written.

    Args:
        checks: those of the training.
    """

    def __init__(self, checks: DeferredChecks) -> None:
        self._checks = checks

    def at_interval(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checks.raise_first()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checks.raise_first()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checks.raise_first()
