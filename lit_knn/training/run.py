"""What callbacks ask of a run: its data, its seed, its folder, its ranks, its progress bar and its logger."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytorch_lightning as pl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger
from tqdm import tqdm

from lit_knn.errors import InputError
from lit_knn.reference import ReferenceSet

TENSORBOARD_DPI = 100
# A bar that is written to a file adds a line at each refresh.
SECONDS_BETWEEN_LINES_IN_A_FILE = 10.0
T = TypeVar("T")


def data_reference(owner: str, trainer: pl.Trainer, may_be_sharded: bool = False) -> ReferenceSet:
    """The reference set of the run's data module, which is set up before callbacks are.

    Args:
        owner: the callback that asks.
        trainer: of the run.
        may_be_sharded: whether every rank asks the set the same number of times.

    Raises:
        InputError: the run's data is not one of `lit_knn.data`, or its images are sharded and may not be.
    """
    reference: ReferenceSet | None = getattr(getattr(trainer, "datamodule", None), "reference", None)
    if reference is None:
        raise InputError(f"{owner}: the data has no reference set; use a data module of lit_knn.data")
    if reference.sharded and not may_be_sharded:
        raise InputError(f"{owner} needs all images on each device: set data.sharded to false")
    return reference


def run_seed(pl_module: pl.LightningModule) -> int:
    """The seed of the run, `--seed_everything`."""
    hparams: Any = pl_module.hparams
    return int(hparams.seed)


def check_stage(owner: str, stage: str) -> None:
    """Refuse to measure in `fit`, where each validation would write over the results of the one before."""
    if stage == "fit":
        raise InputError(f"{owner} is for validate, not for fit")


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


def measuring_bar(trainer: pl.Trainer, total: int | None, description: str, unit: str, leave: bool = True) -> tqdm:
    """A bar with the time left for a callback that measures for long; on the first rank, unless bars are off.

    None is shown without a `total`.
    """
    shown = trainer.is_global_zero and trainer.progress_bar_callback is not None and total is not None
    between = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES_IN_A_FILE
    options = {"desc": description, "unit": unit, "unit_scale": True, "mininterval": between, "leave": leave}
    return tqdm(total=total, disable=not shown, **options)


def show_figure(trainer: pl.Trainer, tag: str, figure: Figure, step: int = 0) -> None:
    """Add a figure to TensorBoard, if that is the run's logger."""
    if isinstance(trainer.logger, TensorBoardLogger):
        figure.set_dpi(TENSORBOARD_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        trainer.logger.experiment.add_image(tag, pixels, step, dataformats="HWC")
