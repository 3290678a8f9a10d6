"""The commands that make a model, data and a trainer: `lit-knn fit|validate|predict|plan|best -c …`."""

import argparse
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
import yaml
from jsonargparse import Namespace, set_loader
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lit_knn.callbacks import RunRecord, RunSummary, StepProgressBar
from lit_knn.commands.cli import trainer_options
from lit_knn.commands.cli.arguments import (
    as_dict,
    check_linked,
    check_text,
    with_config_of_run,
)
from lit_knn.commands.cli.from_data import fill_network
from lit_knn.commands.cli.launch import check_processes
from lit_knn.commands.cli.messages import VAGUE, refusal
from lit_knn.commands.cli.packaged_configs import with_packaged_configs
from lit_knn.commands.cli.parser import Parser, construct, load
from lit_knn.commands.cli.replaced import forget_losses, notes_of_losses
from lit_knn.commands.cli.samples import SAMPLES_HELP, set_samples
from lit_knn.commands.cli.save_config import SaveConfig
from lit_knn.commands.cli.unknown import OF_EVERY_RUN, hint_of_unknown
from lit_knn.commands.entry import COMMANDS
from lit_knn.commands.plan import check_fits
from lit_knn.commands.trainer import Trainer
from lit_knn.common.checkpoint_file import last_checkpoint
from lit_knn.common.errors import InputError, causes, prefixed
from lit_knn.data import ReferenceDataModule
from lit_knn.runs.checkpoints import WholeCheckpointIO, read_training
from lit_knn.runs.folder import METRICS_NAME, RunFolder
from lit_knn.runs.folder_choice import choose_folder
from lit_knn.runs.job import is_first_process, job_folder
from lit_knn.runs.job_starts import checkpoint_of_job
from lit_knn.runs.names import FILE_LOGGERS, expanded, folder_of_name
from lit_knn.runs.resumption import check_fit
from lit_knn.runs.starts import newest_checkpoint

# The command line knows the classes of these modules by bare names: `--data ImageFiles`, `--model.help LitICT`.
NAMED = ["data.modules", "data.own_images", "data.latents", "modules", "nets"]
NAMED += ["modules.augmentation", "modules.time_distributions"]
for module in NAMED:
    importlib.import_module(f"lit_knn.{module}")
set_loader("yaml", load, exceptions=(yaml.YAMLError,))

# Count runs in batches, not in epochs, because an epoch of a small set takes only a second.
TRAINER_DEFAULTS = {
    "default_root_dir": "runs",
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "val_check_interval": 1000,
}

# These commands neither train nor read a checkpoint of a run.
MEASURES = ("best", "probe")

# Lightning also seeds NumPy, whose seeds have 32 bits.
LARGEST_SEED = 2**32 - 1
DEBUG_HELP = "--debug: also show the traceback of an error"


class CLI(LightningCLI):
    """LightningCLI with one seed for everything. Command-line options override the options saved in a checkpoint."""

    _checkpoint: dict[str, Any] | None = None
    _refused: InputError | None = None
    _run: RunFolder | None = None
    _version = ""

    def __init__(self, *args: Any, called: str | None = None, **kwargs: Any) -> None:
        self._called = called
        try:
            super().__init__(*args, **kwargs)
        except Exception as error:
            if self._run is not None:
                if isinstance(error, OSError) and error.filename is None:
                    # A failed write names no file, for instance on a full disk.
                    error.filename = str(self._run.path)
                if is_first_process():
                    # A command that is refused before its first step leaves no folder.
                    self._run.remove_unused()
            raise

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        """Add options only to the called subcommand, if it is known. Options for all would double the start time."""
        if self._called in (None, subcommand):
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        return self.init_parser(**kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link `--seed_everything` to the seeds of model and data; add the options of the callbacks of every run."""
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_seed)
        for option, callback in OF_EVERY_RUN.items():
            parser.add_lightning_class_args(callback, option)
        parser.add_argument("--samples", type=int | None, default=None, help=SAMPLES_HELP)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands without `test`, but with ours."""
        kept = {name: skip for name, skip in LightningCLI.subcommands().items() if name != "test"}
        parts = {"model", "datamodule"}
        return {**kept, **dict.fromkeys(("plan", *MEASURES), parts)}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments; `best` also reads the configuration of its run."""
        self._command_line = list(args)
        args = with_packaged_configs(args)
        check_linked(args)
        check_text(args)
        forget_losses()
        try:
            self.config = parser.parse_args(with_config_of_run(args))
        except argparse.ArgumentError as error:
            message = str(refusal(error))
            raise InputError(message + hint_of_unknown(message)) from error

        command = self.config.get("subcommand")
        parsed = self.config if command is None else self.config[command]
        if not isinstance(parsed["trainer"], Namespace):
            raise InputError("trainer holds no options: it must have lines like `max_steps: 1000`")
        set_samples(parsed, command)
        fill_network(parsed)

        options = as_dict(parsed)
        trainer_options.check_trainer_options(
            options["trainer"], "fit" if command in (None, "plan") else command
        )
        trainer_options.check_learning_rate(options)

        for note in notes_of_losses(options):
            warnings.warn(note, stacklevel=1)

    def _parse_ckpt_path(self) -> None:
        """Check the checkpoint before any long work; `last` is the newest complete checkpoint with the run's name.

        In Lightning's version, the options saved in the checkpoint override the command line.
        """
        command = self.config.get("subcommand")
        if command in (None, *MEASURES):
            return
        options = self.config[command]
        path, fits = options.ckpt_path, command in ("fit", "plan")
        trained = getattr(pkgutil.resolve_name(options.model.class_path), "needs_checkpoint", True)
        if not trained and (command == "fit" or path is not None):
            raise InputError(
                f"{options.model.class_path} has nothing to train: validate it without --ckpt_path"
            )
        if path == "":  # It would be the current folder. A variable of the shell may be unset.
            raise InputError("--ckpt_path is empty")
        if path is None and not fits and trained:
            raise InputError(f"--ckpt_path is missing: {command} needs a trained model")
        try:
            start = checkpoint_of_job(self._as_saved()) if fits and job_folder() else None
            if start is None and path == "last":
                start = newest_checkpoint(self._as_saved(), fits)
            if start is not None:
                options.ckpt_path, self._checkpoint = str(start[0]), start[1]
            elif path is not None:
                with prefixed("--ckpt_path"):
                    options.ckpt_path = str(last_checkpoint(path)) if Path(path).is_dir() else path
                    self._checkpoint = read_training(options.ckpt_path, to_resume=fits)
        except InputError as error:
            if options.trainer.num_nodes == 1:
                raise
            # Only this machine may lack the file: the others would wait for it in vain.
            self._refused = error

    def _as_saved(self) -> dict[str, Any]:
        """Return the options as the run's config.yaml will have them."""
        text = self.parser.dump(self.config, skip_none=False)
        return yaml.safe_load(text)[self.config.subcommand]

    @staticmethod
    def configure_optimizers(
        lightning_module: pl.LightningModule, optimizer: Any, lr_scheduler: Any = None
    ) -> Any:
        """Update a learning-rate schedule after every optimiser step, because runs are counted in steps, not epochs."""
        made = LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)
        # There is no schedule, or it waits for a metric.
        if lr_scheduler is None or isinstance(made, dict):
            return made
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"},
        }

    def before_plan(self) -> None:
        """Check the checkpoint to resume from, and the files that the run would overwrite, before any long work."""
        if self._refused is None:
            path = self.config[self.subcommand].ckpt_path
            check_fit(self.trainer, self.model, self.datamodule, path, self._checkpoint)
        self._check_checkpoint()

    def before_fit(self) -> None:
        self.before_plan()
        self._begin()
        job = job_folder()
        if self._run is not None and job is not None and is_first_process():
            # If the job is queued again, it finds its run by this.
            (self._run.path / job).mkdir(exist_ok=True)

    def before_validate(self) -> None:
        self._check_checkpoint()
        self._begin()

    before_predict = before_validate

    def before_probe(self) -> None:
        """Tell the probe its own command, from which it makes that of the training."""
        self.trainer.command_line = self._command_line  # type: ignore[attr-defined]

    def _check_checkpoint(self) -> None:
        """Check that the checkpoint's weights are for this model, and keep them for Lightning's own loading."""
        if self._refused is not None:
            if not isinstance(self.datamodule, ReferenceDataModule):
                raise self._refused
            # The processes can first tell each other of errors when they load their data.
            self.datamodule.load = partial(_refuse, self._refused)  # type: ignore[method-assign]
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            return
        path, io = self.config[self.subcommand].ckpt_path, self.trainer.strategy.checkpoint_io
        if hasattr(self.model, "check_checkpoint"):
            with prefixed(f"--ckpt_path {path}"):
                self.model.check_checkpoint(checkpoint)
        if isinstance(io, WholeCheckpointIO):
            io.keep(path, checkpoint)

    def _begin(self) -> None:
        """Check the memory, and rename the tables of the earlier part of the run, which a CSV logger would delete."""
        # Networks need no data.
        if self.subcommand != "predict" or not getattr(self.model, "needs_checkpoint", True):
            check_fits(self.trainer, self.model, self.datamodule)
        for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
            if isinstance(logger, CSVLogger):
                RunFolder(Path(logger.log_dir)).keep_earlier(METRICS_NAME)

    def before_instantiate_classes(self) -> None:
        """Choose the folder of the run. `predict` keeps no samples in memory, because the writer saves them."""
        if self.subcommand == "predict" and self.config.predict.return_predictions is None:
            self.config.predict.return_predictions = False
        if self.subcommand not in (None, *MEASURES):
            self._place()

    def instantiate_classes(self) -> None:
        """Make all objects; `construct` explains why an object cannot be made."""
        self.parser.add_instantiator(construct, object)
        try:
            super().instantiate_classes()
        except ValueError as error:
            if not str([*causes(error)][-1]).startswith(VAGUE):
                raise
            # Of a list, the parser chains another reason than the true one.
            raise refusal(error) from error

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Show progress over the whole run, unless the options set another bar or no bar; record a training run."""
        options = (
            self.config_init.trainer
            if self.subcommand is None
            else self.config_init[self.subcommand].trainer
        )
        callbacks = options["callbacks"] or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if options["enable_progress_bar"] is not False and not any(
            isinstance(c, ProgressBar) for c in callbacks
        ):
            callbacks = [*callbacks, StepProgressBar()]
        # Lightning's own logging of hyperparameters knows neither estimator nor net; `SaveConfig` logs all options.
        kwargs = {
            "enable_autolog_hparams": False,
            **trainer_options.validated_at_the_end(options),
            **kwargs,
        }
        elsewhere = self.subcommand == "plan" and self.config[self.subcommand].gpu_gb is not None
        if (
            elsewhere
            and options["accelerator"] in ("gpu", "cuda")
            and not torch.cuda.is_available()
        ):
            kwargs["accelerator"] = "cpu"  # The planned GPUs are those of another machine.
        # Lightning's default, in the run's folder
        if self._run is not None and options["logger"] in (None, True):
            named = folder_of_name(options)
            kwargs = {
                "logger": TensorBoardLogger(named.parent, named.name, self._version),
                **kwargs,
            }
        # Else all runs would go on from each other's checkpoints.
        if self._run is not None and (job := job_folder()):
            kwargs["default_root_dir"] = str(self._run.path / job)
        try:
            trainer = super().instantiate_trainer(**{"callbacks": callbacks, **kwargs})
        except InputError:
            raise
        except (
            ValueError,
            RuntimeError,
            TypeError,
            ImportError,
            MisconfigurationException,
        ) as error:
            raise InputError(trainer_options.explain(error, options)) from error
        # A plan starts no process, and may be made far from the machines.
        if self.subcommand != "plan":
            check_processes(trainer)
        trainer_options.warn_of_unused_gpu(options)
        if self._run is not None:
            trainer.write_into(self._run.path)  # type: ignore[attr-defined]
        return trainer

    def _place(self) -> None:
        """Set the run's folder, and pass the run's name to the loggers that write into it."""
        options = as_dict(self.config)[self.subcommand]
        command, checkpoint = str(self.subcommand), options["ckpt_path"]
        self._run = choose_folder(options["trainer"], options["model"], command, checkpoint)
        self._version = str(self._run.path.relative_to(folder_of_name(options["trainer"])))
        if self.subcommand == "fit" and is_first_process():
            self._run.lock()
        for kind in FILE_LOGGERS:
            self.parser.add_instantiator(self._make_logger, kind, prepend=True)

    def _make_logger(self, kind: type, *args: Any, version: Any = None, **options: Any) -> Any:
        """Make a TensorBoard or CSV logger; its default version is the version of the run."""
        if options.get("save_dir"):
            options["save_dir"] = str(expanded(options["save_dir"]))
        return construct(
            kind, *args, version=self._version if version is None else version, **options
        )


def make_cli(args: Sequence[str] | None = None, run: bool = True) -> CLI:
    """Parse a command line and run it; or without `run`, of options alone, only make model, data and trainer."""
    raising = {"exit_on_error": False, "epilog": DEBUG_HELP, "allow_abbrev": False}
    command = {**raising, "usage": "%(prog)s [-c CONFIG ...] [--OPTION VALUE ...]"}
    subcommands = {name: dict(command) for name in CLI.subcommands()}
    # Lightning tells of its own trainer.
    for name in subcommands.keys() & LightningCLI.subcommands().keys():
        subcommands[name]["description"] = COMMANDS[name].capitalize()
    given = list(sys.argv[1:] if args is None else args)
    return CLI(
        pl.LightningModule,
        pl.LightningDataModule,
        called=given[0] if run and given and given[0] in CLI.subcommands() else None,
        trainer_class=Trainer,
        parser_class=Parser,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        trainer_defaults={**TRAINER_DEFAULTS, "callbacks": [RunRecord(), RunSummary()]},
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={**raising, **(subcommands if run else {})},
        args=given,
        run=run,
    )


def _refuse(error: InputError) -> NoReturn:
    raise error


def _seed(value: Any) -> int:
    if value is None or value is True or not 0 <= value <= LARGEST_SEED:
        raise InputError(
            f"--seed_everything must be a number from 0 to {LARGEST_SEED}, got {value}"
        )
    return int(value)
