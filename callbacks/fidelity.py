"""Distance between generated samples and the data."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torchmetrics.image.fid import FrechetInceptionDistance

from lit_knn.errors import InputError
from lit_knn.metrics import pixel_frechet_distance
from lit_knn.reference import ReferenceSet


class PixelFrechetDistance(pl.Callback):
    """At each validation, log `fd_pixels`: the Fréchet distance of samples and the data, on pixels.

    Fit for small images such as the digits; it is not FID. The model must have `sample(seeds)`, which draws with its
    own number of steps (one, for consistency models, unless told otherwise); the data module a `reference`.
    Samples are split over the ranks.

    Args:
        num_samples: samples drawn, with the seeds 0 to num_samples − 1.
        batch_size: samples drawn at a time, on each rank.
    """

    def __init__(self, num_samples: int = 5000, batch_size: int = 500) -> None:
        if num_samples < 2 or batch_size < 1:
            raise InputError(
                f"PixelFrechetDistance: num_samples={num_samples} must be at least 2 and "
                f"batch_size={batch_size} at least 1"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.last_value: float | None = None
        self._metric: FrechetInceptionDistance | None = None

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample with the averaged weights, which are in place until the EMA callback's turn."""
        if trainer.sanity_checking:
            return
        reference: ReferenceSet = trainer.datamodule.reference  # type: ignore[attr-defined]
        if self._metric is None:
            self._metric = self._real_statistics(trainer, reference).to(pl_module.device)
        metric = self._metric
        metric.reset()
        seeds = torch.arange(trainer.global_rank, self.num_samples, trainer.world_size)
        for batch in seeds.split(self.batch_size):
            metric.update(pl_module.sample(batch), real=False)  # type: ignore[operator]
        value = metric.compute()
        self.last_value = float(value)
        pl_module.log("fd_pixels", value, prog_bar=True, rank_zero_only=True)

    def _real_statistics(self, trainer: pl.Trainer, reference: ReferenceSet) -> FrechetInceptionDistance:
        if min(self.num_samples, reference.N) <= reference.d:
            rank_zero_warn(
                f"fd_pixels: {min(self.num_samples, reference.N)} images give a rank-deficient covariance of the "
                f"{reference.d} pixels; compare it only between equal numbers of samples"
            )
        metric = pixel_frechet_distance(reference.d).to(reference.device)
        for start, x in reference.chunks(4096):
            # The metric adds up over ranks, so every image must count on one rank alone.
            if (start // 4096) % trainer.world_size == trainer.global_rank:
                metric.update(x, real=True)
        return metric
