"""Logs the loss of a training by noise level, its learning rate, and the values that its module adds."""

import math
from collections.abc import Callable
from typing import TypedDict, cast

import pytorch_lightning as pl
import torch
from torch import Tensor

from lit_knn.runs.steps import IntervalCallback
from lit_knn.sampling.noise_grid import LevelRange

# Number of bands of noise levels by which losses are logged.
NOISE_BANDS = 4


class StepOutput(TypedDict):
    """What a training step returns; Lightning hands it on to the callbacks."""

    loss: Tensor  # the scalar to minimise
    item_losses: Tensor  # (B,), detached
    noise_levels: Tensor  # (B,) float64


class TrainingLog(IntervalCallback):
    """Logs averages over the batches since the last log. Sums stay on the device.

    Args:
        level_range: its bands divide the losses by noise level.
        device: the device of the training.
        interval_metrics: returns more values to log.
    """

    def __init__(
        self,
        level_range: LevelRange,
        device: torch.device,
        interval_metrics: Callable[[], dict[str, float]],
    ) -> None:
        self._interval_metrics = interval_metrics
        self._band_edges = level_range.bands(NOISE_BANDS).to(device)
        self._sums = torch.zeros(NOISE_BANDS, device=device)
        self._counts = torch.zeros(NOISE_BANDS, device=device)
        self._logged: set[str] = set()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Add the losses of the batch to those of their bands."""
        step = cast(StepOutput, outputs)
        loss = step["item_losses"]
        band = torch.bucketize(step["noise_levels"], self._band_edges[1:-1])
        self._sums.index_add_(0, band, loss)
        self._counts.index_add_(0, band, torch.ones_like(loss))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def at_interval(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the averages since the last log, and begin new ones."""
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        pl_module.log_dict({"train/lr": lr, **self._interval_metrics(), **self._losses_by_band()})
        self._sums.zero_()
        self._counts.zero_()

    def _losses_by_band(self) -> dict[str, float]:
        """Return the mean loss of each band by name, without bands that have had no item yet.

        A band that is empty now is NaN, because Lightning would log its old value again.
        """
        edges = self._band_edges.tolist()
        totals, counts = self._sums.tolist(), self._counts.tolist()

        losses = {}
        for band in range(NOISE_BANDS):
            name = f"train/loss_t_{edges[band]:.3g}_to_{edges[band + 1]:.3g}"
            if counts[band]:
                losses[name] = totals[band] / counts[band]
                self._logged.add(name)
            elif name in self._logged:
                losses[name] = math.nan
        return losses
