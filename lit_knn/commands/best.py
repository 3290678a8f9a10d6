"""Measure all kept checkpoints of a run and find the best: the protocol of the paper's Table 1 (tab:cifar_fid)."""

import time
from pathlib import Path
from typing import cast

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lit_knn.callbacks.fidelity import Fidelity, SampledModel
from lit_knn.commands.best_report import curve_of, description_of, summary_of_draws
from lit_knn.commands.best_tables import (
    check_averages,
    find_checkpoints,
    open_tables,
    settings_of,
)
from lit_knn.common.distributed import on_first_rank
from lit_knn.common.errors import InputError, check_at_least, prefixed
from lit_knn.common.tables import Row, number
from lit_knn.figures import save_figure
from lit_knn.modules.base import EstimatorTraining
from lit_knn.runs.checkpoints import read_training


class BestCheckpoint(pl.Callback):
    """In `predict`, measure each kept checkpoint of a run that is not in its table yet, and report the best.

    The table has one row for each checkpoint. It is rewritten after each checkpoint, completely or not at all, so that
    an interrupted measurement can continue. All ranks load each checkpoint and share its samples.

    Args:
        fidelity: measures the samples; it sets their number.
        run: folder of the training run; the table and the picture are written there.
        folder: folder of the checkpoints, if it is not that of `run`. If `lit-knn average` wrote averages there, these
            are measured, and the table and the picture are written there.
        draws: how many sets of samples to draw from the best checkpoint in all; the first one served to find it.

    Attributes:
        damaged: for each unreadable checkpoint the reason; filled while measuring.
        metric: name of the metric; the best checkpoint has the lowest value.
    """

    def __init__(
        self, fidelity: Fidelity, run: str, folder: str | None = None, draws: int = 1
    ) -> None:
        check_at_least(1, draws=draws)
        self.fidelity = fidelity
        self.run = Path(run)
        self.folder = folder
        self.draws = draws
        self.damaged: list[str] = []
        self.metric = fidelity.measure.metric

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the checkpoints and their finished measurements, before anything is sampled."""
        steps = trainer.max_steps
        self.checkpoints, self._key = on_first_rank(
            lambda: find_checkpoints(self.run, self.folder, steps)
        )
        # `Fidelity` chooses the images to compare with: held-out ones if its option says so; if the data are latents,
        # the images that they encode.
        self.fidelity.join(trainer, pl_module)
        self.fidelity.check()
        self._reference = self.fidelity.real()

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the tables of measurements, now that the model's options, which they depend on, are known."""
        model = cast(EstimatorTraining, pl_module)
        settings = settings_of(self.fidelity, self._reference, model)
        self._table, self._draws_table = open_tables(
            self.run, self.folder, self._key, self.fidelity, settings
        )
        for table in (self._table, self._draws_table):
            table.refuse_other_settings()
        if self._key == "ema":
            check_averages(self._table, self.checkpoints)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the checkpoints that are not in the table yet, and show the result."""
        remaining = {}
        for key_value, path in self.checkpoints.items():
            if self._table.find(key_value) is None:
                remaining[key_value] = path

        total = len(self.checkpoints)
        done = total - len(remaining)
        rank_zero_info(f"{done} of {total} checkpoints are measured already")
        with self.fidelity.bar(total, "Checkpoints", " checkpoints", leave=True) as bar:
            bar.unit_scale = False  # Show 12, not 12.0: checkpoints are few.
            bar.update(done)
            for key_value, path in remaining.items():
                bar.set_description(path.name)
                if self._load(trainer, pl_module, path):
                    self._table.add(self._measure(trainer, pl_module, key_value, path))
                bar.update()

        if not self._table.rows:
            return
        rows = sorted(self._table.rows, key=lambda row: number(row, self._key))
        best = min(rows, key=lambda row: number(row, self.metric))
        draws = [number(best, self.metric)]
        draws += self._further_draws(trainer, pl_module, number(best, self._key))
        self._conclude(rows, best, draws)

    def _further_draws(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, key_value: float
    ) -> list[float]:
        """Measure further sets of samples of the best checkpoint, and return the values of the metric.

        Args:
            trainer: the trainer, which has the device.
            pl_module: gets the weights.
            key_value: the checkpoint's value in the column that numbers the checkpoints.
        """
        path = self.checkpoints.get(key_value)
        numbers = range(2, self.draws + 1)
        missing = [n for n in numbers if self._draws_table.find(key_value, n) is None]
        if missing and path is not None and self._load(trainer, pl_module, path):
            for n in missing:
                measured = self._measure(trainer, pl_module, key_value, path, n)
                self._draws_table.add(measured | {"draw": n})

        values = []
        for n in numbers:
            # A set that was not measured before is missing if the checkpoint's file is gone or damaged.
            row = self._draws_table.find(key_value, n)
            if row is not None:
                values.append(number(row, self.metric))
        return values

    def _load(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: Path) -> bool:
        """Load the averaged weights of a checkpoint into the model, and return whether all ranks could read it."""
        problem = None
        checkpoint = None
        try:
            checkpoint = read_training(path)
        except InputError as error:
            problem = str(error)

        if not trainer.strategy.reduce_boolean_decision(problem is None, all=True):
            self.damaged.append(problem or f"{path} cannot be read by another rank")
            rank_zero_warn(f"{self.damaged[-1]}; the other checkpoints are measured all the same")
            return False

        assert checkpoint is not None
        pl_module.on_load_checkpoint(checkpoint)
        pl_module.load_state_dict(checkpoint["state_dict"])
        return True

    def _measure(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        key_value: float,
        path: Path,
        draw: int = 1,
    ) -> Row:
        """Measure samples of the loaded weights.

        Args:
            trainer: the trainer, which has the device.
            pl_module: has the weights.
            key_value: the checkpoint's value in the column that numbers the checkpoints.
            path: file of the checkpoint.
            draw: number of the set of samples, from 1; it sets their seeds.

        Returns:
            The row of the table.
        """
        start = time.monotonic()
        fidelity = self.fidelity
        model = cast(SampledModel, pl_module)
        with prefixed(str(path)):
            samples = fidelity.samples(model, draw)
            device = trainer.strategy.root_device
            total = fidelity.num_samples
            values = fidelity.measure(
                self._reference, samples, total=total, device=device, bar=fidelity.bar
            )

        return {
            "step": int(model.step),
            "images_seen": int(model.images_seen),
            self._key: key_value,
            "checkpoint": str(path),
            **values,
            "num_samples": fidelity.num_samples,
            "seconds": round(time.monotonic() - start, 2),
        }

    @rank_zero_only
    def _conclude(self, rows: list[Row], best: Row, draws: list[float]) -> None:
        """Draw the curve of all checkpoints, and print the best one with all its measurements.

        Args:
            rows: rows of all checkpoints, in their order.
            best: the row of the best checkpoint.
            draws: the metric of each of its sets of samples.
        """
        figure = curve_of(rows, best, self._key, self.metric, str(self.run))
        pictures = save_figure(figure, self._table.path.with_suffix(""))

        print(f"\nBest of {len(rows)} checkpoints: {description_of(best, self.metric)}")
        path = self.checkpoints.get(number(best, self._key))
        print(f"  {path or 'Its file is gone, so no further draws are made.'}")
        if len(draws) > 1:
            print(summary_of_draws(self.metric, draws))
            print(f"Draws:    {self._draws_table.path}")
        print(f"Rows:     {self._table.path}")
        print(f"Pictures: {', '.join(map(str, pictures))}")
