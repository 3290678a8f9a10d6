"""Files of results: written whole or not at all, never over earlier ones, and shown in TensorBoard."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytorch_lightning as pl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn

from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError

PNG_DPI = 200
TENSORBOARD_DPI = 100
T = TypeVar("T")


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


def on_first_rank(trainer: pl.Trainer, work: Callable[[], T]) -> T:
    """Do something on the first rank, for all; what goes wrong there stops every rank. A collective.

    Raises:
        InputError: what `work` raised, if it was an InputError or an OSError.
    """
    result, problem = None, None
    if trainer.is_global_zero:
        try:
            result = work()
        except (InputError, OSError) as error:
            problem = str(error)
    result, problem = trainer.strategy.broadcast((result, problem))
    if problem is not None:
        raise InputError(problem)
    return cast(T, result)


def keep_aside(path: Path, reason: str) -> None:
    """Rename a damaged file, with a warning that says to what."""
    names = (path.with_name(f"{path.stem}.damaged-{n}{path.suffix}") for n in range(1, 10_000))
    aside = next(name for name in names if not name.exists())
    path.replace(aside)
    rank_zero_warn(f"{path} is damaged ({reason}): kept as {aside}, and what it had is measured again")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file at once or not at all; its columns are those of all rows, in the order they come up."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with written_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read what `write_rows` wrote.

    Raises:
        InputError: a row has more or fewer fields than the header, as in a file that was cut off.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise InputError(f"{path}: line {number} has not the fields of the header; the file is damaged")
    return rows


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Save as `path`.png and `path`.pdf, each at once or not at all; the paths written."""
    # Laid out once, not at each drawing, of which a figure sees several.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    written = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "pdf")]
    for target in written:
        with written_whole(target) as partial:
            figure.savefig(partial, dpi=PNG_DPI)
    return written


def show_figure(trainer: pl.Trainer, tag: str, figure: Figure, step: int = 0) -> None:
    """Add a figure to TensorBoard, if that is the run's logger."""
    if isinstance(trainer.logger, TensorBoardLogger):
        figure.set_dpi(TENSORBOARD_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        trainer.logger.experiment.add_image(tag, pixels, step, dataformats="HWC")
