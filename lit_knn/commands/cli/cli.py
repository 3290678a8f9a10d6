"""The commands that make a model, data and a trainer: `lit-knn fit|validate|predict|plan|best -c …`."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.cli import LightningCLI, LRSchedulerTypeUnion
from pytorch_lightning.loggers import CSVLogger
from torch.optim import Optimizer

from lit_knn.commands.cli import checkpoint_option, trainer_arguments, trainer_options
from lit_knn.commands.cli.arguments import as_dict
from lit_knn.commands.cli.launch import check_processes
from lit_knn.commands.cli.options import MEASURES, OptionsCLI
from lit_knn.commands.cli.parser import construct
from lit_knn.commands.plan import check_fits
from lit_knn.common.errors import InputError
from lit_knn.runs.folder import METRICS_NAME, RunFolder
from lit_knn.runs.folder_choice import TRAININGS, choose_folder
from lit_knn.runs.lock import is_first_process, lock_folder
from lit_knn.runs.names import FILE_LOGGERS, Options, folder_of_name, job_folder
from lit_knn.runs.resumption import check_fit


class CLI(OptionsCLI):
    """Chooses the folder of the run, makes the objects, and prepares each command."""

    # The folder of the run, and its path from the folder of all runs of the same name.
    _run: RunFolder | None = None
    _version = ""

    # The error because of which the parser could not make an object.
    _not_made: Exception | None = None

    def __init__(self, *args: Any, called: str | None = None, **options: Any) -> None:
        """Parse the command line and run the whole command, which leaves no folder if it trains no step.

        Args:
            args: arguments of Lightning's class.
            called: the command, if the command line begins with one.
            options: keyword arguments of Lightning's class.
        """
        self.called = called
        try:
            super().__init__(*args, **options)
        except Exception as error:
            if self._run is None:
                raise
            if isinstance(error, OSError) and error.filename is None:
                # If the disk is full, the error of a write names no file.
                error.filename = str(self._run.path)
            if is_first_process():
                self._run.remove_unused()
            raise
        # A training whose checkpoint has all its steps already trains none.
        if self.subcommand == "fit" and self._run is not None and is_first_process():
            self._run.remove_unused()

    def before_instantiate_classes(self) -> None:
        """Choose the folder of the run, and let `predict` keep no samples in memory."""
        # `SampleWriter` writes the samples batch by batch.
        if self.subcommand == "predict" and self.config.predict.return_predictions is None:
            self.config.predict.return_predictions = False
        if self.subcommand not in (None, *MEASURES):
            self._choose_folder(as_dict(self.config[self.subcommand]))

    def _choose_folder(self, options: Options) -> None:
        """Choose the run's folder, lock it for a `fit`, and let loggers that write files write into it."""
        trainer = options["trainer"]
        command = str(self.subcommand)
        self._run = choose_folder(trainer, options["model"], command, options["ckpt_path"])
        self._version = str(self._run.path.relative_to(folder_of_name(trainer)))
        if command == "fit" and is_first_process():
            lock_folder(self._run.path)

        for kind in FILE_LOGGERS:
            self.parser.add_instantiator(self._make_logger, kind, prepend=True)

    def instantiate_classes(self) -> None:
        """Make all objects; if one cannot be made, raise the error that says why."""
        self.parser.add_instantiator(self._make, object)
        try:
            super().instantiate_classes()
            return
        except InputError:
            raise
        except ValueError:
            if self._not_made is None:
                raise
        # Raised outside of the `except` block, so that the parser's error, which hides it, is not its context.
        raise self._not_made

    def _make(self, kind: type, *args: object, **options: object) -> object:
        """Make one object for the parser, and keep its error, which the parser would hide if it is in a list."""
        try:
            return construct(kind, *args, **options)
        except Exception as error:
            self._not_made = error
            raise

    def _make_logger(self, kind: type, *args: object, **options: object) -> object:
        """Make a TensorBoard or CSV logger in the folder of the run."""
        trains = self.subcommand in TRAININGS
        options = trainer_arguments.of_logger(options, self._version, trains)
        return self._make(kind, *args, **options)

    def instantiate_trainer(self, **kwargs: object) -> pl.Trainer:
        """Make the trainer of the command, which writes into the run's folder."""
        config = self.config_init if self.subcommand is None else self.config_init[self.subcommand]
        options = config.trainer
        arguments = trainer_arguments.of_every_run(options)
        if self.subcommand == "plan" and config.gpu_gb is not None:
            arguments |= trainer_arguments.of_other_gpu(options)
        if self._run is not None:
            arguments |= trainer_arguments.of_folder(options, self._run, self._version)

        with trainer_options.explained(options):
            trainer = super().instantiate_trainer(**(arguments | kwargs))
        # A plan starts no processes, and may be made on another machine than the run.
        if self.subcommand != "plan":
            check_processes(trainer)
        trainer_options.warn_of_unused_gpu(options)
        if self._run is not None:
            trainer.write_into(self._run.path)  # type: ignore[attr-defined]
        return trainer

    @staticmethod
    def configure_optimizers(
        lightning_module: pl.LightningModule,
        optimizer: Optimizer,
        lr_scheduler: LRSchedulerTypeUnion | None = None,
    ) -> object:
        """Return optimiser and schedule for Lightning, with a schedule that is updated after every optimiser step.

        Lightning would update it after every epoch, but runs are counted in steps.
        """
        made = LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)
        # Without a schedule nothing changes. Lightning returns a dictionary only for one that waits for a metric.
        if lr_scheduler is None or isinstance(made, dict):
            return made
        schedule = {"scheduler": lr_scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    # Lightning calls `before_COMMAND` before it runs the command.

    def before_plan(self) -> None:
        """Check the checkpoint to resume from, and the files that the run would overwrite, before any long work."""
        if self.unreadable is None:
            path = self.config[self.subcommand].ckpt_path
            check_fit(self.trainer, self.model, self.datamodule, path, self.checkpoint)
        self._check_checkpoint()

    def before_fit(self) -> None:
        """Check what a plan checks, and the memory; make the folder of the SLURM job, if there is one."""
        self.before_plan()
        self._begin()
        job = job_folder()
        if self._run is not None and job is not None and is_first_process():
            # By this folder, a job that is queued again finds its run.
            (self._run.path / job).mkdir(exist_ok=True)

    def before_validate(self) -> None:
        """Check the checkpoint and the memory before any long work."""
        self._check_checkpoint()
        self._begin()

    before_predict = before_validate

    def before_probe(self) -> None:
        """Give the command line to the probe, which makes the command of the next training from it."""
        self.trainer.command_line = self.command_line  # type: ignore[attr-defined]

    def _check_checkpoint(self) -> None:
        """Check that the checkpoint fits this model, and give it to the trainer, which alone holds it then.

        If it cannot be read, the error is raised when the data are loaded.
        """
        if self.unreadable is not None:
            checkpoint_option.refuse_when_loaded(self.datamodule, self.unreadable)

        checkpoint = self.checkpoint
        self.checkpoint = None
        if checkpoint is not None:
            path = self.config[self.subcommand].ckpt_path
            checkpoint_option.hand_over(self.trainer, self.model, path, checkpoint)

    def _begin(self) -> None:
        """Check that the data fit the memory, and keep the tables of the earlier part of the run."""
        # A network draws samples without the data.
        if self.subcommand != "predict" or not getattr(self.model, "needs_checkpoint", True):
            check_fits(self.trainer, self.model, self.datamodule)
        self._keep_tables()

    @rank_zero_only
    def _keep_tables(self) -> None:
        """Rename the tables of the earlier part of the run, which a CSV logger would delete."""
        for logger in self.trainer.loggers:
            if isinstance(logger, CSVLogger):
                RunFolder(Path(logger.log_dir)).keep_earlier(METRICS_NAME)
