"""Saves the options of a run in its folder, and passes them to the loggers as one dictionary without nesting."""

from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import TensorBoardLogger

from lit_knn.commands.cli.arguments import as_dict
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.names import Options, flattened, options_in

# The trainer's options that change the result.
OPTIONS_OF_THE_TRAINER = ("max_steps", "precision", "accumulate_grad_batches")
# The first three options change how a run reads data, but no result. The seed of the data is that of the model.
NOT_LOGGED = frozenset({"data.cache_dir", "data.num_workers", "data.pin_memory", "data.seed"})


Scalar = str | int | float | bool
"""A value by which loggers compare runs."""


class SaveConfig(SaveConfigCallback):
    """Saves the options of a command in the run's folder as `config.yaml`; files of earlier parts of the run stay."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save the options of a command that is no training."""
        if stage != "fit":
            self._save(trainer, pl_module, stage)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the options of a training, now that all its checks have passed.

        A training that is refused must not replace the settings of the run that it resumes.
        """
        self._save(trainer, pl_module, "fit")

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save the options, and keep the file of the earlier part of the run under another name if it differs."""
        # Every rank must read `log_dir`, because reading it is a collective operation.
        run = RunFolder(Path(str(trainer.log_dir)))
        saves = not self.already_saved and trainer.is_global_zero
        earlier = run.keep_earlier(self.config_filename) if saves else None
        super().setup(trainer, pl_module, stage)
        if earlier is None:
            return
        if earlier.read_bytes() == (run.path / self.config_filename).read_bytes():
            earlier.unlink()

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log the options that affect the result in every logger, under dotted names such as `estimator.k`."""
        options = as_dict(self.config)
        if options["trainer"]["enable_autolog_hparams"] is False:
            return

        settings = {"model": options["model"]["class_path"]}
        settings |= options_in(options["model"])
        for name in ("data", "optimizer", "lr_scheduler"):
            settings[name] = options.get(name)
        for name in OPTIONS_OF_THE_TRAINER:
            settings[name] = options["trainer"].get(name)

        flat = loggable(settings)
        for name in NOT_LOGGED:
            flat.pop(name, None)

        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(flat)
                continue

            from torch.utils.tensorboard.summary import hparams

            # TensorBoard compares runs by their options only if metrics are written with the options, even no metrics.
            logger.log_hyperparams(flat, {})
            for summary in hparams(flat, {})[1:]:
                logger.experiment.file_writer.add_summary(summary)


def loggable(options: Options) -> dict[str, Scalar]:
    """Return dotted names and values of all options, such as `estimator` and `estimator.k`, without null.

    The value of an option that is an object, such as `estimator`, is its class. Classes of known packages have their
    last name alone.

    Args:
        options: a configuration, which may be nested.
    """
    values: dict[str, Scalar] = {}
    for name, value in flattened(options):
        if isinstance(value, str):
            package, _, last = value.rpartition(".")
            known = package.partition(".")[0] in ("lit_knn", "torch", "pytorch_lightning")
            values[name] = last if known else value
        elif isinstance(value, (int, float)):
            values[name] = value
        elif value is not None:
            # A function is logged by its name.
            values[name] = getattr(value, "__name__", str(value))
    return values
