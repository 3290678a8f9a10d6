"""Give every logger the options of the run."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from lit_knn.training import hyperparameters


class Hyperparameters(pl.Callback):
    """Give every logger the options of model, estimator, net and data, with which it compares runs.

    TensorBoard shows them in its tab HPARAMS, beside the values of the validations. `lit-knn fit` and `validate` add
    this callback in place of Lightning's own logging of hyperparameters, which knows neither estimator nor net.

    Args:
        options: the parsed options of the command; by default, what module and data know of their arguments.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options
        self._told: hyperparameters.Flat = {}
        self._before: set[str] = set()
        self._shown = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the options."""
        self._log(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the options of a run of `validate`; note which values are not of this validation."""
        if trainer.state.fn == "validate":
            self._log(trainer, pl_module)
        self._before = set(trainer.logged_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let TensorBoard compare runs by the values of this validation."""
        if not trainer.sanity_checking:
            self._show(trainer, set(trainer.logged_metrics) - self._before)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Without any validation, let TensorBoard compare runs by the loss."""
        self._show(trainer, {"train/loss"} & set(trainer.logged_metrics))

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        told = hyperparameters.of_objects(pl_module, getattr(trainer, "datamodule", None))
        self._told = told if self.options is None else hyperparameters.of_options(self.options)
        self._shown = False
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # TensorBoard needs the names of the values first, which the first validation tells.
                logger.log_hyperparams(self._told, {})
            else:
                logger.log_hyperparams(self._told)

    def _show(self, trainer: pl.Trainer, names: set[str]) -> None:
        """Write options and names of values for the tab HPARAMS, which then takes the values from the scalars."""
        if self._shown or not names:
            return
        self._shown = True
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                writer = logger.experiment._get_file_writer()
                # Lightning's `log_hyperparams` would also log the values once more.
                for summary in hparams(self._told, dict.fromkeys(sorted(names), 0.0)):
                    writer.add_summary(summary)
