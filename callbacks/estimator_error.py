"""Squared bias, variance and MSE (Eq. 15) of estimators over noise levels: Figure 3."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_info
from tqdm import tqdm

from lit_knn.errors import InputError
from lit_knn.estimators import Estimator, ExactFloat64
from lit_knn.figures.figure3 import error_figure
from lit_knn.figures.save import save_figure
from lit_knn.metrics import LatentMeans, MeanAndError, bias_share
from lit_knn.metrics.error_curve import TIME, FixedSource, PosteriorSource, measure, quantities
from lit_knn.metrics.latents import NoisyLatents, bind_all, check_at_least, check_estimators, noise_grid
from lit_knn.results import write_rows
from lit_knn.training.run import check_new, check_stage, data_reference, measuring_bar, run_seed, show_figure

ERRORS = ("mse", "bias_sq", "bias_sq_corrected", "variance")
# Columns of the other quantities of `estimator_measurement`.
COLUMNS = {
    "effective_sample_size": "effective_sample_size",
    "largest_weight": "largest_weight",
    "certified_mse": "certified_mse",
    "recall": "search_recall",
    "found_mass": "posterior_mass_found",
    "normaliser_ratio": "Zq_over_pt",
    "eq12_variance": "eq12_variance",
    "bound_4_1": "theorem_4_1_bound",
    "bound_4_2": "theorem_4_2_bound",
    TIME: TIME,
}
CSV_NAME, FIGURE_NAME = "estimator_error.csv", "figure3"


class EstimatorError(pl.Callback):
    """At validation, measure estimators against the exact posterior mean, which is computed once for all of them.

    Writes `estimator_error.csv`, one row for each estimator and noise level, and Figure 3 (`figure3.png`, `.pdf`) to
    the run's folder, and both to TensorBoard. Columns, means over the latents: MSE, squared bias (plain, and corrected
    for the finite number of repeats) and variance per dimension, of the posterior mean (`mu_`) and of the score
    (`score_`), with standard errors over the latents (`_se`); the share of the MSE that is squared bias, corrected
    (`bias_share`); of sampling estimators the effective sample size, the largest weight
    and what they estimate of their own MSE (`certified_mse`); of KNN the search recall, the posterior mass found,
    Z_q / p_t, and both sides of Theorems 4.1 and 4.2, divided by d.

    Latents are split over ranks in the same batches for any number of ranks, and every draw is a function of (seed,
    batch, level, estimator, repeat): the numbers depend on `batch_size`, but not on the number of ranks.

    Args:
        estimators: by name.
        noise_levels: the levels t; or how many, equally spaced in ln t from `t_min` to `t_max`.
        t_min: smallest level, where `noise_levels` is a number.
        t_max: largest level, where `noise_levels` is a number.
        num_z: latents, one for each of as many images of the reference set.
        repeats: estimates at each latent; 1 for estimators that are deterministic.
        batch_size: latents at a time.
        resample_source: draw `x_source` for each repeat from the posterior p_t(x|z) instead of keeping the x that z was
            made from. The MSE is the same in expectation. What `STF` and `OneSample` owe to the choice of their source
            then counts as variance, while with a fixed source, as in the paper, it counts as bias: all of STF's bias.

    Raises:
        InputError: an option out of its range; at `setup`, a run of `fit`, more latents than images, or results of
            an earlier run in the run's folder.
    """

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
    ) -> None:
        self.estimators = check_estimators("EstimatorError", estimators)
        self.levels = noise_grid("EstimatorError", noise_levels, t_min, t_max)
        check_at_least("EstimatorError", 1, num_z=num_z, repeats=repeats, batch_size=batch_size)
        self.num_z = num_z
        self.batch_size = batch_size
        self.resample_source = resample_source
        self.repeats = {name: 1 if self._is_deterministic(e) else repeats for name, e in self.estimators.items()}
        drawn = [name for name, e in self.estimators.items() if not self._is_deterministic(e)]
        if drawn and repeats < 2:
            raise InputError(f"EstimatorError: repeats must be at least 2 to tell the variance of {drawn[0]}, got 1")
        self.rows: list[dict[str, Any]] = []

    def _is_deterministic(self, estimator: Estimator) -> bool:
        return estimator.deterministic and not (estimator.uses_source and self.resample_source)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything long begins."""
        check_stage("EstimatorError", stage)
        N = data_reference("EstimatorError", trainer).N
        if self.num_z > N:
            raise InputError(f"EstimatorError: num_z={self.num_z} is more than the {N} images of the reference set")
        check_new("EstimatorError", trainer, CSV_NAME, f"{FIGURE_NAME}.png")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure, level by level; finished levels are in the CSV at once."""
        log_dir = trainer.log_dir  # a collective: every rank must ask
        if trainer.sanity_checking:
            return
        folder = Path(log_dir or trainer.default_root_dir)
        reference = data_reference("EstimatorError", trainer)
        bind_all("EstimatorError", self.estimators, reference, max(self.levels))
        latents = NoisyLatents(reference, self.num_z, run_seed(pl_module))
        self.rows = []
        mine = sum(len(numbers) for _, numbers in self._batches(trainer))
        total = mine * len(self.levels) * sum(self.repeats.values())
        with measuring_bar(trainer, total, "Estimator error", " estimates") as bar:
            for level in range(len(self.levels)):
                means = self._measure_level(trainer, latents, level, bar)
                # On every rank: computing adds up over ranks.
                self.rows += [
                    self._row(name, level, mean.compute()) for name, mean in zip(self.estimators, means, strict=True)
                ]
                if trainer.is_global_zero:
                    write_rows(folder / CSV_NAME, self.rows)
        for name in self.estimators:
            peak = max(row["score_mse"] for row in self.rows if row["estimator"] == name)
            pl_module.log(f"peak_score_mse/{name}", peak, rank_zero_only=True)
        if trainer.is_global_zero:
            self._show(trainer, folder)

    def _batches(self, trainer: pl.Trainer) -> Iterator[tuple[int, range]]:
        """The batches that are this rank's: their numbers, and those of the latents in each."""
        starts = range(0, self.num_z, self.batch_size)
        for batch in range(trainer.global_rank, len(starts), trainer.world_size):
            yield batch, range(starts[batch], min(starts[batch] + self.batch_size, self.num_z))

    def _measure_level(self, trainer: pl.Trainer, latents: NoisyLatents, level: int, bar: tqdm) -> list[LatentMeans]:
        """The means of each estimator's quantities at one noise level, over the latents of this rank."""
        t, seed, reference = self.levels[level], latents.seed, latents.reference
        exact = ExactFloat64().bind(reference)
        cases = list(zip(self.estimators.values(), self.repeats.values(), strict=True))
        means = [LatentMeans(quantities(*case)).to(reference.device) for case in cases]
        for batch, numbers in self._batches(trainer):
            z, x = latents.batch(numbers, t)
            mu = exact.posterior_mean(z.double(), t)
            key = (seed, batch, level)
            source: FixedSource | PosteriorSource = FixedSource(x)
            if self.resample_source:
                source = PosteriorSource(reference, z, t, max(self.repeats.values()), key)
            for index, (estimator, repeats) in enumerate(cases):
                means[index].update(**measure(estimator, repeats, z, t, mu, source, (*key, index)))
                bar.update(len(z) * repeats)
        return means

    def _row(self, name: str, level: int, means: dict[str, MeanAndError]) -> dict[str, Any]:
        """A row of the CSV; what an estimator does not have is left empty."""
        t = self.levels[level]
        row: dict[str, Any] = {"estimator": name, "t": t, "num_z": self.num_z, "repeats": self.repeats[name]}
        for prefix, scale in (("mu", 1.0), ("score", t**-4)):
            for error in ERRORS:
                known = means.get(error)
                row[f"{prefix}_{error}"] = "" if known is None else known.mean * scale
                row[f"{prefix}_{error}_se"] = "" if known is None else known.standard_error * scale
        share = None
        if "variance" in means and means["mse"].mean > 0:
            share = bias_share(means["mse"], means["bias_sq_corrected"], means["variance"])
        row["bias_share"], row["bias_share_se"] = ("", "") if share is None else share
        return {**row, **{column: means[name].mean if name in means else "" for name, column in COLUMNS.items()}}

    def _show(self, trainer: pl.Trainer, folder: Path) -> None:
        """Figure 3, and the curves in TensorBoard with the number of the noise level as step."""
        figure = error_figure(self.rows)
        paths = save_figure(figure, folder / FIGURE_NAME)
        show_figure(trainer, FIGURE_NAME, figure)
        if isinstance(trainer.logger, TensorBoardLogger):
            for row in self.rows:
                for column, value in row.items():
                    if column not in ("estimator", "num_z", "repeats") and value != "" and not column.endswith("_se"):
                        step = self.levels.index(row["t"])
                        trainer.logger.experiment.add_scalar(f"{column}/{row['estimator']}", value, step)
        for name in self.estimators:
            peak = max((row for row in self.rows if row["estimator"] == name), key=lambda row: row["score_mse"])
            error = f"{peak['score_mse']:.1e} ± {peak['score_mse_se']:.1e}"
            rank_zero_info(f"Peak score MSE of {name}: {error}, at t = {peak['t']:.3g}")
        rank_zero_info(f"Estimator error is in {folder / CSV_NAME} and {paths[0]}")
