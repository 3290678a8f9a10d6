"""Measure squared bias, variance and MSE (Eq. 15) of estimators over noise levels, and draw Figure 3."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info

from lit_knn.common.errors import prefixed
from lit_knn.common.tables import write_rows
from lit_knn.estimators import Estimator
from lit_knn.figures import figure3, save_figure
from lit_knn.metrics import ErrorCurve
from lit_knn.metrics.latents import noise_grid
from lit_knn.runs.pictures import show_figure
from lit_knn.runs.run import check_new, check_stage, data_reference, measuring_bar, run_seed

CSV_NAME, FIGURE_NAME = "estimator_error.csv", "figure3"
# The logger gets the largest value over the noise levels of these columns, which are the terms of Eq. 15 (eq:MSE).
PEAKS = ("score_mse", "score_bias_sq", "score_variance")


class EstimatorError(pl.Callback):
    """At validation, measure estimators against the exact posterior mean, which is computed once for all of them.

    Writes `estimator_error.csv`, one row for each estimator and noise level, and Figure 3 (`figure3.png`, `.pdf`) to
    the run's folder. The logger gets the picture and the peak over t of each error. `lit_knn.metrics.ErrorCurve.levels`
    explains the columns.

    Args:
        estimators: by name.
        noise_levels: the levels t; or their number, for levels evenly spaced in ln t from `t_min` to `t_max`.
        t_min: smallest level, if `noise_levels` is a number.
        t_max: largest level, if `noise_levels` is a number.
        num_z: number of latents, each made from another image of the reference set.
        repeats: estimates at each latent; deterministic estimators make one.
        batch_size: latents at a time.
        resample_source: draw `x_source` for each repeat from the posterior p_t(x|z) instead of keeping the x that made
            z. The MSE is the same in expectation. Errors of `STF` and `OneSample` that come from their source then
            count as variance. With a fixed source, as in the paper, they count as bias.
        class_conditional: compare with the exact mean over the images of each latent's class, and make the estimators
            class-conditional, too.

    Raises:
        InputError: an option out of its range; at `setup`, a run of `fit`, more latents than images, no labels though
            `class_conditional` is true, or results of an earlier run in the run's folder.
    """

    @prefixed("EstimatorError")
    def __init__(
        self,
        estimators: dict[str, Estimator],
        noise_levels: list[float] | int = 24,
        t_min: float = 0.1,
        t_max: float = 80.0,
        num_z: int = 10_000,
        repeats: int = 100,
        batch_size: int = 128,
        resample_source: bool = False,
        class_conditional: bool = False,
    ) -> None:
        levels = noise_grid(noise_levels, t_min, t_max)
        self.estimators = estimators
        self.curve = ErrorCurve(estimators, levels, num_z, repeats, batch_size, resample_source, class_conditional)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse settings that cannot work, before any long work."""
        check_stage("EstimatorError", stage)
        with prefixed("EstimatorError"):
            self.curve.check(data_reference("EstimatorError", trainer))
        check_new("EstimatorError", trainer, CSV_NAME, f"{FIGURE_NAME}.png")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure level by level, and write each finished level to the CSV at once."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        if trainer.sanity_checking:
            return
        folder = Path(log_dir or trainer.default_root_dir)
        rows: list[dict[str, Any]] = []
        reference = data_reference("EstimatorError", trainer)
        bar = measuring_bar(trainer, self.curve.estimates, "Estimator error", " estimates", leave=True)
        with bar, prefixed("EstimatorError"):
            for level in self.curve.levels(reference, run_seed(pl_module), bar.update):
                rows += level
                if trainer.is_global_zero:
                    write_rows(folder / CSV_NAME, rows)
        for name in self.curve.estimators:
            own = [row for row in rows if row["estimator"] == name]
            for error in PEAKS:
                values = [row[error] for row in own if row[error] != ""]
                if values:  # An estimator without randomness has an MSE alone.
                    pl_module.log(f"estimator/peak_{error}/{name}", max(values), rank_zero_only=True)
            peak = max(own, key=lambda row: row["score_mse"])
            error = f"{peak['score_mse']:.1e} ± {peak['score_mse_se']:.1e}"
            rank_zero_info(f"Peak score MSE of {name}: {error}, at t = {peak['t']:.3g}")
        if trainer.is_global_zero:
            self._show(trainer, rows, folder)

    def _show(self, trainer: pl.Trainer, rows: list[dict[str, Any]], folder: Path) -> None:
        """Draw Figure 3."""
        figure = figure3(rows)
        paths = save_figure(figure, folder / FIGURE_NAME)
        show_figure(trainer, f"estimator/{FIGURE_NAME}", figure)
        rank_zero_info(f"Estimator error is in {folder / CSV_NAME} and {paths[0]}")
