"""Show the results of a run."""

from pathlib import Path
from shlex import quote

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger

from lit_knn.callbacks.fidelity import Fidelity
from lit_knn.callbacks.last_checkpoint import LastCheckpoint
from lit_knn.callbacks.sample_grid import SampleGrid
from lit_knn.common.tables import TITLES


class RunSummary(pl.Callback):
    """When training ends, print its last values, the paths of its results, and the command of TensorBoard."""

    @rank_zero_only
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the results of all callbacks, and how to open TensorBoard, on the first rank."""
        print()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for line in _results_of(callback, trainer):
                print(line)

        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                folder = _short(Path(logger.log_dir).parent)
                print(f"TensorBoard:  tensorboard --logdir {quote(str(folder))}")


def _results_of(callback: pl.Callback, trainer: pl.Trainer) -> list[str]:
    """Return the lines to print about a callback: its last values, or the paths of what it wrote."""
    if isinstance(callback, Fidelity):
        values = callback.last_values.items()
        return [f"{TITLES.get(name, name)}: {value:#.4g}" for name, value in values]

    if isinstance(callback, SampleGrid):
        return [f"Samples:      {_short(path)}" for path in callback.last_paths]

    if isinstance(callback, LastCheckpoint):
        # A resumed run that had no step left has saved nothing, so its checkpoint is the one that it started from.
        saved = callback.last_saved or trainer.ckpt_path
        if saved is not None:
            return [f"Checkpoint:   {_short(saved)}"]

    if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
        best = callback.best_model_path
        if best:
            return [f"Best {callback.monitor}: {_short(best)}"]
    return []


def _short(path: str | Path) -> Path:
    """Return a path relative to the working directory if it lies there, or else as it is."""
    path = Path(path)
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd())
    return path
