"""Draw Figure 2 (fig:denoiser_viz): the posterior mean and its estimates, as pictures over noise levels."""

from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info

from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.pixels import are_pictures
from lit_knn.estimators import Estimator
from lit_knn.figures import figure2, save_figure
from lit_knn.metrics import mean_pictures
from lit_knn.metrics.latents import bind_all, check_at_least, check_not_empty, noise_grid
from lit_knn.runs.pictures import show_figure
from lit_knn.runs.run import check_new, check_stage, data_reference, run_seed

FIGURE_NAME = "figure2"


class MeanPicture(pl.Callback):
    """At validation, draw z, the exact posterior mean and its estimates, one per row, with one column per noise level.

    Each of a few images of the data gets one picture: `figure2_0.png` and `.pdf` and so on in the run's folder, and in
    TensorBoard. The z of all columns have the same noise, and are shown divided by sqrt(1 + t²).

    Args:
        estimators: by name, in the order of the rows.
        noise_levels: the columns; or their number, for levels evenly spaced in ln t from `t_min` to `t_max`.
        t_min: smallest level, if `noise_levels` is a number.
        t_max: largest level, if `noise_levels` is a number.
        num_images: number of pictures.

    Raises:
        InputError: an option out of its range; at `setup`, a run of `fit`, data that are not images of 1 or 3
            channels, or results of an earlier run in the run's folder.
    """

    def __init__(
        self,
        estimators: dict[str, Estimator],
        noise_levels: list[float] | int = 10,
        t_min: float = 0.2,
        t_max: float = 80.0,
        num_images: int = 2,
    ) -> None:
        with prefixed("MeanPicture"):
            check_not_empty(estimators=estimators)
            check_at_least(1, num_images=num_images)
            self.levels = noise_grid(noise_levels, t_min, t_max)
        self.estimators = estimators
        self.num_images = num_images

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse data and settings that cannot be drawn."""
        check_stage("MeanPicture", stage)
        reference = data_reference("MeanPicture", trainer)
        if not are_pictures(reference.shape):
            raise InputError(f"MeanPicture: the data must be images of 1 or 3 channels, not {reference.shape}")
        if self.num_images > reference.N:
            raise InputError(f"MeanPicture: num_images={self.num_images} is more than the {reference.N} of the data")
        check_new("MeanPicture", trainer, *(f"{FIGURE_NAME}_{i}.png" for i in range(self.num_images)))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compute the estimates on the first rank, and draw them."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        if trainer.sanity_checking:
            return
        reference = data_reference("MeanPicture", trainer)
        with prefixed("MeanPicture"):
            # Every rank must bind the estimators, because one rank builds a cached index for all ranks.
            bind_all(self.estimators, reference, max(self.levels))
        if not trainer.is_global_zero:
            return
        rows = mean_pictures(self.estimators, reference, self.levels, self.num_images, run_seed(pl_module))
        for i in range(self.num_images):
            figure = figure2({name: images[:, i] for name, images in rows.items()}, self.levels)
            paths = save_figure(figure, Path(log_dir or trainer.default_root_dir) / f"{FIGURE_NAME}_{i}")
            show_figure(trainer, f"{FIGURE_NAME}/{i}", figure)
            rank_zero_info(f"Posterior means are in {paths[0]}")
