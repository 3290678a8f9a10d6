"""Measure bias, variance and MSE (Eq. 15) of estimators over noise levels; draw Figure 3."""

from collections.abc import Sequence
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import prefixed
from lit_knn.common.tables import Row, write_rows
from lit_knn.estimators import Estimator
from lit_knn.figures import figure3, trajectory_error
from lit_knn.metrics import ErrorCurve
from lit_knn.metrics.latents import levels_of
from lit_knn.metrics.trajectory_curve import TrajectoryCurve

CSV_NAME, FIGURE_NAME = "estimator_error.csv", "figure3"
SAMPLER_CSV_NAME, SAMPLER_FIGURE_NAME = "sampler_error.csv", "sampler_error"
# The logger gets the largest value over the noise levels of these columns, which are the terms of
# Eq. 15 (eq:mse).
PEAKS = ("score_mse", "score_bias_sq", "score_variance")


class EstimatorError(Measurement):
    """At validation, measure the errors of estimators against the exact posterior mean.

    The exact mean is computed once for all estimators. The run's folder gets `estimator_error.csv`,
    which has one row for each estimator and noise level, and Figure 3 (`figure3.png` and `.pdf`). The
    loggers get the picture and, of each error, the largest value over the noise levels t.
    `lit_knn.metrics.ErrorCurve.levels` explains the columns.

    Args:
        estimators: the estimators to measure, by name.
        noise_levels: the levels t; or their number, for levels evenly spaced in ln t from `t_min`
            to `t_max`.
        t_min: smallest level, if `noise_levels` is a number.
        t_max: largest level, if `noise_levels` is a number.
        num_z: number of latents, each made from another image of the reference set.
        repeats: estimates at each latent; deterministic estimators make one.
        batch_size: latents at a time.
        resample_source: draw `x_source` for each repeat from the posterior p_t(x|z) instead of
            keeping the x that made z. Errors of `STF` and `OneSample` from their source then count
            as variance, and not, as in the paper, as bias. The MSE is the same in expectation.
        trajectories: also measure each estimator at the latents of its own sampling, `num_z`
            samples of EDM's sampler: `sampler_error.csv`, with the same columns, and
            `sampler_error.png`, which shows both errors. Estimators must work without a source.
    """

    outputs: Sequence[str] = (CSV_NAME, f"{FIGURE_NAME}.png")

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
        trajectories: bool = False,
    ) -> None:
        levels = levels_of(noise_levels, t_min, t_max)
        self.estimators = estimators
        self.curve = ErrorCurve(
            estimators,
            levels,
            num_z=num_z,
            repeats=repeats,
            batch_size=batch_size,
            resample_source=resample_source,
        )
        self.sampled_curve: TrajectoryCurve | None = None
        if trajectories:
            self.sampled_curve = TrajectoryCurve(estimators, levels, num_z, repeats, batch_size)
            self.outputs = (*self.outputs, SAMPLER_CSV_NAME, f"{SAMPLER_FIGURE_NAME}.png")

    def check(self) -> None:
        """Check that the estimators can be measured on the data at these noise levels."""
        self.curve.check(self.reference)

    def evaluate(self) -> None:
        """Measure the errors, at latents of the forward process and, if wanted, of sampling; draw both."""
        if self.sampled_curve is not None:
            with prefixed("trajectories"):
                self.sampled_curve.bind(self.reference)

        table = self.run_folder / CSV_NAME
        rows = self._measured(self.curve, "Estimator error", table)
        for name in self.curve.estimators:
            self._log_peaks(name, [row for row in rows if row["estimator"] == name])
        self._draw(rows, table)
        if self.sampled_curve is not None:
            table = self.run_folder / SAMPLER_CSV_NAME
            sampled_rows = self._measured(self.sampled_curve, "Error while sampling", table)
            self._draw_sampling(rows, sampled_rows, table)

    def _measured(self, curve: ErrorCurve | TrajectoryCurve, title: str, table: Path) -> list[Row]:
        """Measure errors at all noise levels, and return the rows of the table, written after each level.

        Args:
            curve: the measurement.
            title: what its progress bar says.
            table: the file of the rows.
        """
        rows: list[Row] = []
        with self.bar(curve.estimates, title, " estimates", leave=True) as bar:
            for level in curve.levels(self.reference, self.seed, bar.update):
                rows += level
                rank_zero_only(write_rows)(table, rows)
        return rows

    @rank_zero_only
    def _draw_sampling(self, forward: list[Row], rows: list[Row], table: Path) -> None:
        """Draw both errors, and print where the table and the picture are."""
        figure = trajectory_error(forward, rows)
        picture = self.save_figure(figure, SAMPLER_FIGURE_NAME, f"estimator/{SAMPLER_FIGURE_NAME}")
        rank_zero_info(f"Errors at latents of the estimators' own sampling: {table}, {picture}")

    @rank_zero_only
    def _draw(self, rows: list[Row], table: Path) -> None:
        """Draw Figure 3 from the rows of the table, and print where both are."""
        picture = self.save_figure(figure3(rows), FIGURE_NAME, f"estimator/{FIGURE_NAME}")
        rank_zero_info(f"Estimator error is in {table} and {picture}")

    def _log_peaks(self, name: str, levels: list[Row]) -> None:
        """Log the largest errors of an estimator over the noise levels.

        Args:
            name: name of the estimator.
            levels: its rows of the table, one for each level.
        """
        for column in PEAKS:
            values = [row[column] for row in levels if row[column] != ""]
            if values:  # For an estimator without randomness, only the MSE has values.
                self.module.log(f"estimator/peak_{column}/{name}", max(values), rank_zero_only=True)

        peak = max(levels, key=lambda row: row["score_mse"])
        error = f"{peak['score_mse']:.1e} ± {peak['score_mse_se']:.1e}"
        rank_zero_info(f"Peak score MSE of {name}: {error}, at t = {peak['t']:.3g}")
