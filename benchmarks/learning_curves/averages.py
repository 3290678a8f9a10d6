"""Averages of the weights of other lengths than the run's own, measured like it, so that one training shows all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.learning_curves.grid import Run
from benchmarks.learning_curves.sample_measurements import SampleMeasurements
from lit_knn.common.tables import Row
from lit_knn.modules.power_averages import TrackedAverages
from lit_knn.runs.steps import StepCallback

# Relative lengths of power-function averages: standard deviation as a share of the training so far.
LENGTHS = (0.02, 0.05, 0.1, 0.2)


class MeasuredAverages(StepCallback):
    """Tracks averages of all `LENGTHS`, and measures errors and samples of each.

    Args:
        measurements: what to measure.

    Attributes:
        rows: the row of each length, after the measurement.
    """

    def __init__(self, measurements: SampleMeasurements) -> None:
        self.measurements = measurements
        self.rows: dict[float, Row] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the weights that the averages begin with."""
        self._tracked = TrackedAverages(pl_module, torch.device("cpu"), LENGTHS)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on."""
        return {"rows": self.rows, "tracked": self._tracked.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after these rows."""
        self.rows = state_dict["rows"]
        self._tracked.load_state_dict(state_dict["tracked"])

    def on_step_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Update the averages."""
        seen = pl_module.images_seen
        self._tracked.update(pl_module, seen - pl_module.images_of_step, seen)

    def measure(self, module: Any, row: Row) -> None:
        """Measure all averages. Times, images and steps are those of `row`, of the run's own average."""
        for length, weights in zip(LENGTHS, self._tracked.weights(), strict=True):
            with weights_of(module, weights):
                errors = self.measurements.errors(module)
                samples = self.measurements.samples(module)
                quality = self.measurements.quality_row(module, samples)
            # The loss in validation and the gradients are those of the run's own row.
            self.rows[length] = {**row, **errors, **quality}

    def runs(self, run: Run) -> dict[Run, list[Row]]:
        """Return the row of each length, by names of runs such as `ECT lr 3e-4, average 0.05`."""
        return {
            run._replace(module=f"{run.module}, average {length:g}"): [row]
            for length, row in self.rows.items()
        }


@contextmanager
def weights_of(module: Any, weights: dict[str, Tensor]) -> Iterator[None]:
    """Replace the weights of a module within a `with` block."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(weights)
    try:
        yield
    finally:
        module.load_state_dict(before)
