"""Show the results of a run."""

from pathlib import Path
from shlex import quote

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger

from lit_knn.callbacks.fidelity import Fidelity
from lit_knn.callbacks.last_checkpoint import LastCheckpoint
from lit_knn.callbacks.sample_grid import SampleGrid
from lit_knn.common.tables import TITLES


class RunSummary(pl.Callback):
    """When training ends, print the paths of the checkpoint and the sample pictures and the TensorBoard command."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        lines: list[str] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Fidelity):
                lines.extend(
                    f"{TITLES.get(name, name)}: {value:#.4g}"
                    for name, value in callback.last_values.items()
                )
            elif (
                isinstance(callback, ModelCheckpoint)
                and callback.monitor is not None
                and callback.best_model_path
            ):
                lines.append(f"Best {callback.monitor}: {_short(callback.best_model_path)}")
            elif isinstance(callback, LastCheckpoint):
                # A resumed run that had no step left to do has saved none.
                saved = callback.last_saved or trainer.ckpt_path
                lines.extend([] if saved is None else [f"Checkpoint:   {_short(saved)}"])
            elif isinstance(callback, SampleGrid):
                lines.extend(f"Samples:      {_short(path)}" for path in callback.last_paths)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                lines.append(
                    f"TensorBoard:  tensorboard --logdir {quote(str(_short(Path(logger.log_dir).parent)))}"
                )
        print("\n".join(["", *lines]))


def _short(path: str | Path) -> Path:
    """Make a path relative to the working directory if that is shorter to read."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
