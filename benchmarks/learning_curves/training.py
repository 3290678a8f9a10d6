"""Trains one run of the grid and returns its rows."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from benchmarks.learning_curves.averages import MeasuredAverages
from benchmarks.learning_curves.grid import Run, targets
from benchmarks.learning_curves.kind import INITIAL_WEIGHTS
from benchmarks.learning_curves.kinds import KINDS
from benchmarks.learning_curves.measured_checkpoint import MeasuredCheckpoint
from benchmarks.learning_curves.sample_measurements import SampleMeasurements
from benchmarks.learning_curves.sets import ImageSet
from lit_knn.callbacks import StepProgressBar
from lit_knn.commands.trainer import Trainer
from lit_knn.common.checkpoint_file import LAST_NAME
from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.pixels import to_uint8
from lit_knn.common.rng import keyed_default_rng
from lit_knn.common.tables import Row
from lit_knn.data.base import Images, Labels, ReferenceDataModule
from lit_knn.reference import ReferenceSet
from lit_knn.runs.clock import training_clock

# Samples of a run that the pictures show.
PICTURES = 16


class Loaded(ReferenceDataModule):
    """Data whose reference set, with its index, all runs of a process share."""

    def __init__(self, reference: ReferenceSet, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reference = reference

    def load(self) -> tuple[Images, Labels]:
        """See `ReferenceDataModule.load`; never called, because the reference set exists."""
        raise NotImplementedError


class Measure(pl.Callback):
    """Measures at each validation: samples and error with the averaged weights, the gradient with the current ones.

    Args:
        measurements: what to measure.
        pictures: file for the first samples at the end, or None.
        averages: measures further averages at the end, or None.

    Attributes:
        rows: the rows so far.
    """

    def __init__(
        self,
        measurements: SampleMeasurements,
        pictures: Path | None,
        averages: MeasuredAverages | None = None,
    ) -> None:
        self.measurements, self.pictures, self.averages = measurements, pictures, averages
        self.rows: list[Row] = []
        self._cpu_seconds, self._since = 0.0, math.nan  # NaN while the clock stands

    def _elapsed(self) -> float:
        return self._cpu_seconds + (
            0.0 if math.isnan(self._since) else time.process_time() - self._since
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on: the rows and the time so far."""
        return {"rows": self.rows, "cpu_seconds": self._elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after these rows."""
        self.rows, self._cpu_seconds = list(state_dict["rows"]), state_dict["cpu_seconds"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the processor's time."""
        self._since = time.process_time()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock for the measurements."""
        self._cpu_seconds, self._since = self._elapsed(), math.nan

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin a row. The averaged weights stay in the network until the callback that averages runs."""
        trained = training_clock(trainer).total()
        self.rows.append(
            {
                "step": trainer.global_step,
                "hardware": ", ".join(trained.hardware),
                "images": pl_module.images_seen,
                "cpu_seconds": round(self._cpu_seconds, 2),
                "seconds": round(trained.seconds, 2),
                "estimator_seconds": round(trained.estimator_seconds, 2),
                **self.measurements.errors(pl_module),
                **self._of_samples(trainer, pl_module),
            }
        )

    def _of_samples(self, trainer: pl.Trainer, module: Any) -> Row:
        samples = self.measurements.samples(module)
        if self.pictures is not None and trainer.global_step == trainer.max_steps:
            with written_whole(self.pictures) as partial, partial.open("wb") as file:
                np.save(file, to_uint8(samples[:PICTURES]).numpy())
        return self.measurements.quality_row(module, samples)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """End the row. The current weights are back, and the clock of the training still stands."""
        self.rows[-1]["val_loss"] = trainer.callback_metrics["val/loss"].item()
        self.rows[-1] |= self.measurements.gradient_row(pl_module)
        if self.averages is not None and trainer.global_step == trainer.max_steps:
            self.averages.measure(pl_module, self.rows[-1])
        self._since = time.process_time()


def train(
    run: Run,
    image_set: ImageSet,
    measurements: SampleMeasurements | None,
    reference: ReferenceSet,
    folder: Path,
    start: Path | None = None,
    pictures: Path | None = None,
) -> dict[Run, list[Row]]:
    """Train a run, or go on from its last checkpoint in `folder`; return one row per measurement.

    Averages of other lengths are further runs of the result.

    Args:
        run: the run.
        image_set: its set.
        measurements: what to measure; None for a run whose rows are there, which only makes its checkpoint.
        reference: the images of the set.
        folder: where its checkpoint is kept.
        start: the checkpoint that a module tunes, or None.
        pictures: file for the first samples at the end, or None.

    Raises:
        InputError: the training has ended, but lacks a measurement.
    """
    lengths, kind = image_set.lengths, KINDS[run.module]
    steps = kind.steps(lengths)
    with keyed_default_rng(torch.device("cpu"), run.seed, INITIAL_WEIGHTS):
        net = image_set.net(**kind.net_options)
    module = kind.make(net, targets(run.set, run.module)[run.estimator](), run.seed, steps, start)
    batch_size = kind.batches * lengths.batch_size
    data = Loaded(reference, batch_size=batch_size, seed=run.seed, val_images=lengths.held)
    every = steps // lengths.measurements
    averages = MeasuredAverages(measurements) if measurements and kind.more_averages else None
    measure = Measure(measurements, pictures, averages) if measurements else None
    measuring = [callback for callback in (measure, averages) if callback is not None]
    # Lightning orders callbacks so that the checkpoint after a validation holds its row.
    last = MeasuredCheckpoint(every, str(folder))
    bars = [StepProgressBar()] if sys.stdout.isatty() else []
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1,
        val_check_interval=every, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, inference_mode=False, logger=False,
        enable_progress_bar=bool(bars), enable_model_summary=False,
        callbacks=[*measuring, last, *bars],
    )  # fmt: skip
    begun = folder / LAST_NAME
    trainer.fit(module, data, ckpt_path=str(begun) if begun.exists() else None)
    if measure is None:
        return {}

    lacking = set(range(every, steps + 1, every)) - {row["step"] for row in measure.rows}
    if lacking:
        problem = f"the training lacks measurements, of the steps {sorted(lacking)}"
        raise InputError(f"{folder}: {problem}; remove the folder to train again")
    # The run itself comes last, because a run in the table counts as finished.
    return (averages.runs(run) if averages else {}) | {run: measure.rows}
