"""Trains one run, and measures it at log-spaced steps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.learning_curves.kinds import INITIAL_WEIGHTS
from benchmarks.learning_curves.measurements import HELD
from benchmarks.learning_curves.regression import EDM
from benchmarks.learning_curves.training import Loaded, Measure
from benchmarks.memorisation.runs import ESTIMATORS, Lengths, Run, network
from lit_knn.callbacks.last_checkpoint import LastCheckpoint
from lit_knn.commands.trainer import Trainer
from lit_knn.common.checkpoint_file import LAST_NAME
from lit_knn.common.rng import keyed_default_rng
from lit_knn.common.tables import Row
from lit_knn.metrics import Pixels
from lit_knn.metrics.fidelity import frechet_distance_of_statistics, image_statistics
from lit_knn.metrics.memorisation import memorisation
from lit_knn.modules import LitEDM
from lit_knn.reference import ReferenceSet

# With a half-life above this share of the images seen (lit_knn/modules/regression.py), the share holds. The average of
# the weights then lags by the same factor at every step, and no ratio of times depends on it.
OPTIONS = {**EDM().options(0), "ema_half_life_images": 10**9}
STEPS_BETWEEN_CHECKPOINTS = 500


class Measurements:
    """The measurements of runs on one training set. The noise of the samples differs between seeds.

    Args:
        train: the training set.
        held_out: images that the run does not train on.
        lengths: numbers of latents and samples.
    """

    def __init__(self, train: ReferenceSet, held_out: ReferenceSet, lengths: Lengths) -> None:
        self.kind, self.train, self.lengths = EDM(), train, lengths
        sets = {"train": train, "held": held_out}
        # Both have the same noise levels and noise, so that their difference is that of the images.
        self.latents = {name: self.kind.latents(each, lengths.held, HELD) for name, each in sets.items()}
        self.exact = self.kind.exact_output(self.latents["train"], self.kind.exact().bind(train))
        self.pixels = Pixels()
        self.real = image_statistics(held_out, self.pixels)

    @torch.no_grad()
    def row(self, module: LitEDM) -> dict[str, float]:
        """Measure copies, distance and errors. The errors have EDM's weight and are means over latents and pixels."""
        numbers = torch.arange(self.lengths.samples) + module.hparams.seed * self.lengths.samples
        samples = torch.cat([module.sample(seeds) for seeds in numbers.split(256)])
        distance = frechet_distance_of_statistics(image_statistics(samples, self.pixels), self.real)
        wanted = {f"{name}_error": (each, each.x) for name, each in self.latents.items()}
        wanted["exact_error"] = self.latents["train"], self.exact
        errors = {name: self.kind.errors(module, *each).mean().item() for name, each in wanted.items()}
        return {**memorisation(samples, self.train), "fd_pixels": distance, **errors}


class MeasureCopies(Measure):
    """Measures the averaged weights at the given steps, and ends the run after the row that is its last.

    Args:
        measurements: what to measure.
        steps: when, ascending.
        put: called with all rows after each measurement; tells whether the run is finished.
    """

    measurements: Any

    def __init__(self, measurements: Any, steps: Sequence[int], put: Callable[[list[Row]], bool]) -> None:
        super().__init__(measurements)
        self.steps, self.put = steps, put

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and plan the next measurement."""
        super().on_train_start(trainer, pl_module)
        self._plan(trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make a row with the averaged weights."""
        row = {"step": trainer.global_step, "cpu_seconds": round(self._cpu_seconds, 2)}
        self.rows.append({**row, **self.measurements.row(pl_module)})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Hand the rows over, plan the next measurement, and start the clock again."""
        trainer.should_stop = self.put(self.rows)
        self._plan(trainer)
        self.start_clock()

    def _plan(self, trainer: pl.Trainer) -> None:
        """Validate at the next step. Lightning validates at the multiples of this number."""
        done = int(self.rows[-1]["step"]) if self.rows else 0
        trainer.val_check_batch = next((step for step in self.steps if step > done), self.steps[-1])


def train(
    run: Run,
    measurements: Measurements,
    lengths: Lengths,
    last_step: int,
    folder: Path,
    put: Callable[[list[Row]], bool],
) -> None:
    """Train a run, or go on from its last checkpoint in `folder`.

    Args:
        run: the run.
        measurements: what to measure; they hold the training set.
        lengths: how it is measured.
        last_step: the run is not longer than this.
        folder: where its checkpoint is kept.
        put: see `MeasureCopies`.
    """
    with keyed_default_rng(torch.device("cpu"), run.seed, INITIAL_WEIGHTS):
        net = network()
    module = LitEDM(net, ESTIMATORS[run.estimator](), measure_target=False, seed=run.seed, **OPTIONS)
    data = Loaded(measurements.train, batch_size=lengths.batch_size, seed=run.seed, val_images=1)
    steps = lengths.steps(last_step)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps[-1], max_epochs=-1,
        val_check_interval=steps[0], check_val_every_n_epoch=None,
        num_sanity_val_steps=0, inference_mode=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            MeasureCopies(measurements, steps, put),
            LastCheckpoint(every_n_steps=STEPS_BETWEEN_CHECKPOINTS, dirpath=str(folder)),
        ],
    )  # fmt: skip
    begun = folder / LAST_NAME
    trainer.fit(module, data, ckpt_path=str(begun) if begun.exists() else None)
