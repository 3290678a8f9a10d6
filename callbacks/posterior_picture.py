"""Figure 1 (fig:posterior_illustration): the posterior and the nearest-neighbour proposal of points on a line."""

from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info

from lit_knn.common.errors import InputError, prefixed
from lit_knn.estimators import KNN
from lit_knn.figures import figure1, save_figure
from lit_knn.metrics.latents import noise_grid
from lit_knn.runs.pictures import show_figure
from lit_knn.runs.run import check_new, check_stage, data_reference

FIGURE_NAME = "figure1"


class PosteriorPicture(pl.Callback):
    """At validation, draw the posterior p_t(x|z) and the proposal q_t(x|z) of a one-dimensional data set.

    Each noise level has a panel; the files are `figure1.png` and `.pdf` in the run's folder, and TensorBoard.

    Args:
        k: number of neighbours of the proposal.
        z: the latent, one number.
        noise_levels: noise levels of the panels.

    Raises:
        InputError: a noise level that is not above 0; at `setup`, a run of `fit`, data of more than one dimension,
            k > N, or results of an earlier run in the run's folder.
    """

    def __init__(self, k: int = 8, z: float = 0.12, noise_levels: tuple[float, ...] = (0.02, 0.2, 3.0)) -> None:
        self.knn = KNN(k=k, n=1)
        self.z = float(z)
        with prefixed("PosteriorPicture"):
            self.levels = noise_grid(noise_levels, 0, 0)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse data and settings that cannot be drawn."""
        check_stage("PosteriorPicture", stage)
        reference = data_reference("PosteriorPicture", trainer)
        if reference.d != 1:
            raise InputError(f"PosteriorPicture: the data must have one dimension, it has {reference.d}")
        self.knn.bind(reference)
        check_new("PosteriorPicture", trainer, f"{FIGURE_NAME}.png")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the picture."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        figure = figure1(self.knn, data_reference("PosteriorPicture", trainer), self.z, self.levels)
        paths = save_figure(figure, Path(log_dir or trainer.default_root_dir) / FIGURE_NAME)
        show_figure(trainer, FIGURE_NAME, figure)
        rank_zero_info(f"Posterior and proposal are in {paths[0]}")
