"""Files of results: written whole or not at all, never over earlier ones, and shown in TensorBoard."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger

from lit_knn.errors import InputError

PNG_DPI = 200
TENSORBOARD_DPI = 100


def check_new(owner: str, trainer: pl.Trainer, *names: str) -> None:
    """Refuse to start where results of an earlier run are; all ranks must ask.

    Raises:
        InputError: the run's folder has a file of one of these names.
    """
    folder = trainer.log_dir
    taken = next((name for name in names if folder and (Path(folder) / name).exists()), None)
    taken = trainer.strategy.broadcast(taken)  # as the first rank sees it, so that all ranks stop
    if taken is not None:
        raise InputError(f"{owner}: {Path(str(folder)) / taken} exists; nothing is overwritten, use another folder")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the names of the first one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Save as `path`.png and `path`.pdf; the paths written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Laid out once, not at each drawing, of which a figure sees several.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    written = []
    for suffix in ("png", "pdf"):
        target = path.with_name(f"{path.name}.{suffix}")
        temporary = path.with_name(f".{path.name}.tmp.{suffix}")
        figure.savefig(temporary, dpi=PNG_DPI)
        os.replace(temporary, target)
        written.append(target)
    return written


def show_figure(trainer: pl.Trainer, tag: str, figure: Figure, step: int = 0) -> None:
    """Add a figure to TensorBoard, if that is the run's logger."""
    if isinstance(trainer.logger, TensorBoardLogger):
        figure.set_dpi(TENSORBOARD_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        trainer.logger.experiment.add_image(tag, pixels, step, dataformats="HWC")
