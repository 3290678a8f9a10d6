"""Saves the options of a run in its folder, and passes them to the loggers as one flat dictionary."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import TensorBoardLogger

from lit_knn.commands.cli.arguments import as_dict
from lit_knn.runs.folder import CONFIG_NAME, RunFolder

# These options of the trainer change the result.
OF_THE_TRAINER = ("max_steps", "precision", "accumulate_grad_batches")
# These options set where a run computes and reads, not what. The seed of the data equals the seed of the model.
NOT_LOGGED = frozenset({"data.cache_dir", "data.num_workers", "data.pin_memory", "data.seed"})


Scalar = str | int | float | bool
"""A value that loggers compare runs by."""


class SaveConfig(SaveConfigCallback):
    """Saves `config.yaml` in the run's folder, or for a measurement there `config_validate.yaml`; earlier ones stay.

    A training saves it when its checks have passed: a refused one must not replace the settings of the run that it
    resumes.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            self._save(trainer, pl_module, stage)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, pl_module, "fit")

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save the options once; an equal file of an earlier part of the run is not kept twice."""
        # Every rank must read `log_dir`: it is a collective operation.
        run = RunFolder(Path(str(trainer.log_dir)))
        saves = not self.already_saved and trainer.is_global_zero
        if stage != "fit" and (run.path / CONFIG_NAME).is_file():
            self.config_filename = f"config_{trainer.state.fn.value}.yaml"  # type: ignore[union-attr]

        earlier = run.keep_earlier(self.config_filename) if saves else None
        super().setup(trainer, pl_module, stage)
        if earlier is None:
            return
        if earlier.read_bytes() == (run.path / self.config_filename).read_bytes():
            earlier.unlink()

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the options that change the result to every logger, flat, so that it can compare runs: `estimator.k`."""
        options = as_dict(self.config)
        if options["trainer"]["enable_autolog_hparams"] is False:
            return

        settings = {"model": options["model"]["class_path"]}
        settings |= options["model"].get("init_args") or {}
        for name in ("data", "optimizer", "lr_scheduler"):
            settings[name] = options.get(name)
        for name in OF_THE_TRAINER:
            settings[name] = options["trainer"].get(name)

        flat: dict[str, Scalar] = {}
        for name, value in settings.items():
            flat.update(pairs(name, value))
        for name in NOT_LOGGED:
            flat.pop(name, None)

        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(flat)
                continue

            from torch.utils.tensorboard.summary import hparams

            # Without these empty metrics, TensorBoard would not compare runs by the options in which they differ.
            logger.log_hyperparams(flat, {})
            for summary in hparams(flat, {})[1:]:
                logger.experiment.file_writer.add_summary(summary)


def pairs(name: str, value: object) -> Iterator[tuple[str, Scalar]]:
    """Flatten one option, such as `estimator` to `estimator` and `estimator.k`. Null, a default, is left out."""
    if isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield from pairs(name, value["class_path"])
            value = value.get("init_args") or {}
        for part, option in value.items():
            yield from pairs(f"{name}.{part}", option)
    elif isinstance(value, str):
        package, _, last = value.rpartition(".")
        known = package.partition(".")[0] in ("lit_knn", "torch", "pytorch_lightning")
        yield name, last if known else value
    elif isinstance(value, (int, float)):
        yield name, value
    elif value is not None:
        # A function becomes its name.
        yield name, getattr(value, "__name__", str(value))
