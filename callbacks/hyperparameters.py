"""Give every logger the options of the run."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger

from lit_knn.runs import hyperparameters


class Hyperparameters(pl.Callback):
    """Give every logger the options of model, estimator, net and data, with which it compares runs.

    TensorBoard shows them in its tab HPARAMS, beside the latest scalars. `lit-knn fit` and `validate` add
    this callback in place of Lightning's own logging of hyperparameters, which knows neither estimator nor net.

    Args:
        options: the parsed options of the command; by default, what module and data know of their arguments.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the options."""
        self._log(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the options of a run of `validate`."""
        if trainer.state.fn == "validate":
            self._log(trainer, pl_module)

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.options is None:
            told = hyperparameters.of_objects(pl_module, getattr(trainer, "datamodule", None))
        else:
            told = hyperparameters.of_options(self.options)
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(told)
                continue
            # Without these empty metrics, Lightning would log a metric of -1.
            logger.log_hyperparams(told, {})
            if trainer.is_global_zero:
                from torch.utils.tensorboard.summary import hparams

                # The first summary describes the options of all runs alike. Without it TensorBoard compares the runs,
                # shows first the options in which they differ, and takes all scalars as their results.
                _, *session = hparams(told, {})
                for summary in session:
                    logger.experiment._get_file_writer().add_summary(summary)
