"""Show the results of a run and its time."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger

from callbacks.fidelity import Fidelity
from callbacks.last_checkpoint import LastCheckpoint
from callbacks.sample_grid import SampleGrid
from lit_knn.atomic_files import written_whole
from lit_knn.results import TITLES, TRAINING_TIME_JSON


class RunSummary(pl.Callback):
    """When training ends, print the paths of the checkpoint and the sample pictures and the TensorBoard command.

    `training_time.json` in the run's folder holds the time of training, with resumed parts and without validations. It
    is written at each checkpoint, at the end, and when the run is interrupted. `python -m lit_knn.training.time_table`
    makes a table of several runs.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the run's folder on all ranks now, because an interruption may reach only one rank."""
        self._log_dir = trainer.log_dir

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the training time that belongs to the checkpoint."""
        self._write_time(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the training time of an interrupted run."""
        if trainer.state.fn == "fit" and trainer.global_step > 0:
            self._write_time(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the paths of the results that exist."""
        log_dir = trainer.log_dir  # Every rank must read `log_dir`, because reading it is a collective operation.
        self._write_time(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        lines: list[str] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Fidelity):
                lines.extend(f"{TITLES.get(name, name)}: {value:.3f}" for name, value in callback.last_values.items())
            elif isinstance(callback, ModelCheckpoint) and callback.monitor is not None and callback.best_model_path:
                lines.append(f"Best {callback.monitor}: {_short(callback.best_model_path)}")
            elif isinstance(callback, LastCheckpoint):
                lines.append(f"Checkpoint:   {_short(callback.best_model_path)}")
            elif isinstance(callback, SampleGrid):
                lines.extend(f"Samples:      {_short(path)}" for path in callback.last_paths)
        if isinstance(trainer.logger, TensorBoardLogger) and log_dir is not None:
            lines.append(f"TensorBoard:  tensorboard --logdir {_short(Path(log_dir).parent)}")
        print("\n".join(["", *lines]))

    def _write_time(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log_dir = getattr(self, "_log_dir", None)
        if not trainer.is_global_zero or log_dir is None or not hasattr(pl_module, "training_time"):
            return
        time = pl_module.training_time()  # type: ignore[operator]
        record = {**asdict(time), "images_seen": pl_module.images_seen, "step": trainer.global_step}
        with written_whole(Path(log_dir) / TRAINING_TIME_JSON) as partial:
            partial.write_text(json.dumps(record, indent=2) + "\n")


def _short(path: str | Path) -> Path:
    """Make a path relative to the working directory if that is shorter to read."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
