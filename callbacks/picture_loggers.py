"""Gives pictures to the loggers of a run."""

import numpy as np
import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger


@rank_zero_only
def show_picture(trainer: pl.Trainer, pixels: np.ndarray, tag: str, step: int = 0) -> None:
    """Give a picture to every logger that takes pictures, on the first rank.

    Args:
        trainer: the trainer, which has the loggers.
        pixels: the picture, (H, W, 3), uint8.
        tag: name of the picture.
        step: number of the step.
    """
    for logger in trainer.loggers:
        log_image = getattr(logger, "log_image", None)
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, pixels, step, dataformats="HWC")
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_image(
                logger.run_id, pixels, artifact_file=f"{tag}/step_{step}.png"
            )
        # W&B's logger has the method `log_image`, and so have loggers of other packages.
        elif callable(log_image):
            log_image(key=tag, images=[pixels], step=step)
