"""Pictures of a run: they go to files, and to every logger of the run that takes pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger, MLFlowLogger, TensorBoardLogger
from torch import Tensor

from lit_knn.common.files import written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCREEN_DPI = 100


def save_picture(trainer: pl.Trainer, picture: Tensor, path: Path, tag: str, step: int = 0) -> None:
    """Write a picture (3, H, W) in [0, 1] to a file, and give the loggers the same pixels."""
    # Training needs neither torchvision nor matplotlib, so that only pictures import them.
    from PIL import Image
    from torchvision.utils import save_image

    with written_whole(path) as partial:
        save_image(picture, partial)
    with Image.open(path) as written:
        log_picture(trainer, tag, np.asarray(written.convert("RGB")), step)


def show_figure(trainer: pl.Trainer, tag: str, figure: Figure, step: int = 0) -> None:
    """Give the loggers a figure as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if trainer.loggers and trainer.is_global_zero:
        figure.set_dpi(SCREEN_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        log_picture(trainer, tag, np.asarray(canvas.buffer_rgba())[..., :3], step)


def log_picture(trainer: pl.Trainer, tag: str, pixels: np.ndarray, step: int = 0) -> None:
    """Give a picture (H, W, 3), uint8, to every logger that takes pictures; the others, such as CSV, get nothing."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            _log(logger, tag, pixels, step)


def _log(logger: Logger, tag: str, pixels: np.ndarray, step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(tag, pixels, step, dataformats="HWC")
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_image(logger.run_id, pixels, artifact_file=f"{tag}/step_{step}.png")
    # W&B's logger has this method, and so have loggers of other packages.
    elif callable(log_image := getattr(logger, "log_image", None)):
        log_image(key=tag, images=[pixels], step=step)
