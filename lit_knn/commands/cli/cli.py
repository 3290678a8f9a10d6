"""The commands that make a model, data and a trainer: `lit-knn fit|validate|predict|plan|best -c …`."""

import argparse
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lit_knn.commands.cli import checkpoint_option, trainer_options
from lit_knn.commands.cli.arguments import as_dict, check_linked, check_text, with_config_of_run
from lit_knn.commands.cli.from_data import fill_network
from lit_knn.commands.cli.launch import check_processes
from lit_knn.commands.cli.messages import VAGUE, refusal
from lit_knn.commands.cli.packaged_configs import with_packaged_configs
from lit_knn.commands.cli.parser import construct
from lit_knn.commands.cli.replaced import forget_losses, notes_of_losses
from lit_knn.commands.cli.samples import SAMPLES_HELP, set_samples
from lit_knn.commands.cli.trainer_arguments import (
    arguments_of_every_run,
    arguments_of_folder,
    arguments_of_other_gpu,
)
from lit_knn.commands.cli.unknown import OF_EVERY_RUN, hint_of_unknown
from lit_knn.commands.plan import check_fits
from lit_knn.common.errors import InputError, causes, prefixed
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.folder import METRICS_NAME, RunFolder
from lit_knn.runs.folder_choice import choose_folder
from lit_knn.runs.lock import is_first_process, lock_folder
from lit_knn.runs.names import FILE_LOGGERS, expanded, folder_of_name, job_folder
from lit_knn.runs.resumption import check_fit

# These commands neither train nor read a checkpoint of a run.
MEASURES = ("best", "probe")

# Lightning's trainer refuses its options with these errors.
REFUSALS = (ValueError, RuntimeError, TypeError, ImportError, MisconfigurationException)

# Lightning also seeds NumPy, whose seeds have 32 bits.
LARGEST_SEED = 2**32 - 1


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
        if self._called not in (None, subcommand):
            return self.init_parser(**kwargs)

        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand not in LightningCLI.subcommands():
            # The help shows the groups in this order: after -h and -c the options of the command alone.
            *groups, options = parser._action_groups
            parser._action_groups = [*groups[:2], options, *groups[2:]]
        return parser

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
        commands = LightningCLI.subcommands()
        del commands["test"]
        for name in ("plan", *MEASURES):
            commands[name] = {"model", "datamodule"}
        return commands

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
        measures = command not in (None, "plan")
        trainer_options.check_trainer_options(options["trainer"], command if measures else "fit")
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
        path = options.ckpt_path
        checkpoint_option.check_path(path, command, options.model.class_path)

        try:
            start = checkpoint_option.find_start(path, command, self._as_saved)
            if start is not None:
                options.ckpt_path = str(start[0])
                self._checkpoint = start[1]
            elif path is not None:
                with prefixed("--ckpt_path"):
                    options.ckpt_path = checkpoint_option.file_of(path)
                    to_resume = checkpoint_option.resumes(command)
                    self._checkpoint = read_training(options.ckpt_path, to_resume=to_resume)
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
            checkpoint_option.refuse_when_loaded(self.datamodule, self._refused)

        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            path = self.config[self.subcommand].ckpt_path
            checkpoint_option.hand_over(self.trainer, self.model, path, checkpoint)

    def _begin(self) -> None:
        """Check the memory, and keep the tables of the earlier part of the run."""
        # Networks need no data.
        if self.subcommand != "predict" or not getattr(self.model, "needs_checkpoint", True):
            check_fits(self.trainer, self.model, self.datamodule)
        self._keep_tables()

    @rank_zero_only
    def _keep_tables(self) -> None:
        """Rename the tables of the earlier part of the run, which a CSV logger would delete."""
        for logger in self.trainer.loggers:
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
            first_cause = list(causes(error))[-1]
            if not str(first_cause).startswith(VAGUE):
                raise
            # For a list, the parser chains a reason that is not the true one.
            raise refusal(error) from error

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the trainer of the command, which writes into the run's folder."""
        config = self.config_init
        if self.subcommand is not None:
            config = config[self.subcommand]
        options = config.trainer

        arguments = arguments_of_every_run(options)
        if self.subcommand == "plan" and config.gpu_gb is not None:
            arguments |= arguments_of_other_gpu(options)
        if self._run is not None:
            arguments |= arguments_of_folder(options, self._run, self._version)

        try:
            trainer = super().instantiate_trainer(**(arguments | kwargs))
        except InputError:
            raise
        except REFUSALS as error:
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
        self._run = choose_folder(
            options["trainer"], options["model"], str(self.subcommand), options["ckpt_path"]
        )
        self._version = str(self._run.path.relative_to(folder_of_name(options["trainer"])))

        if self.subcommand == "fit" and is_first_process():
            lock_folder(self._run.path)
        for kind in FILE_LOGGERS:
            self.parser.add_instantiator(self._make_logger, kind, prepend=True)

    def _make_logger(self, kind: type, *args: Any, version: Any = None, **options: Any) -> Any:
        """Make a TensorBoard or CSV logger; its default version is the version of the run."""
        if options.get("save_dir"):
            options["save_dir"] = str(expanded(options["save_dir"]))
        if version is None:
            version = self._version
        return construct(kind, *args, version=version, **options)


def _seed(value: Any) -> int:
    if value is None or value is True or not 0 <= value <= LARGEST_SEED:
        raise InputError(
            f"--seed_everything must be a number from 0 to {LARGEST_SEED}, got {value}"
        )
    return int(value)
