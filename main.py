"""The application: `python main.py fit|validate|predict|plan -c configs/….yaml`, `… best --run RUN`, `… report RUN`."""

import argparse
import importlib
import os
import pkgutil
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from callbacks import RunRecord, StepProgressBar
from lit_knn import report
from lit_knn.errors import InputError, LostProcessError, NonFiniteLossError
from lit_knn.trainer import Trainer
from lit_knn.training.kept_checkpoints import config_of_run

# The command line knows the classes of these modules by bare names: `--data ImageFiles`, `--model.help LitICT`.
for module in ("data", "edm", "ict", "lit_estimator", "nets", "training.augmentation"):
    importlib.import_module(f"lit_knn.{module}")

# A parser's message has these lines around the actual reason.
FRAMES = (
    *("Does not validate", "Subtypes:", "Errors:", "Given value", "Parser key", "Problem with given class_path"),
    "Expected a <class 'NoneType'>",
)

# `best` uses these parts of a run's configuration; the other parts say how its training was started.
PARTS_OF_A_RUN = ("seed_everything", "model", "data", "trainer")

_load_yaml = jsonargparse.get_loader("yaml")


def _load(text: str) -> Any:
    """Load YAML; `None` also means null, because jsonargparse turns null into `None` inside nested options."""
    value = _load_yaml(text)
    return None if value == "None" else value


jsonargparse.set_loader("yaml", _load, exceptions=(yaml.YAMLError,))


class CLI(LightningCLI):
    """LightningCLI with one seed for everything. Command-line options override the options saved in a checkpoint."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Make `--seed_everything` also set the random streams of the model and the order of the data."""
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_seed)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands without `test`, but with `plan` and `best`."""
        kept = {name: skip for name, skip in LightningCLI.subcommands().items() if name != "test"}
        return {**kept, "plan": {"model", "datamodule"}, "best": {"model", "datamodule"}}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments; `best` also reads the configuration of its run."""
        self.config = parser.parse_args(with_config_of_run(sys.argv[1:] if args is None else args))

    def _parse_ckpt_path(self) -> None:
        """Check that the checkpoint exists before anything long begins.

        In Lightning's version, the options saved in the checkpoint override the command line. Then users could set
        neither the sampling steps of `predict` nor the length of a resumed run.
        """
        command = self.config.get("subcommand")
        if command in (None, "plan", "best"):
            return
        options = self.config[command]
        path = options.ckpt_path
        trained = getattr(pkgutil.resolve_name(options.model.class_path), "needs_checkpoint", True)
        if command == "fit" and not trained:
            raise InputError(f"fit: {options.model.class_path} has nothing to train; use validate or predict")
        if path is None and command != "fit" and trained:
            raise InputError(f"--ckpt_path is missing: {command} needs a trained model")
        if path is not None and not Path(path).is_file():
            raise InputError(f"--ckpt_path {path}: no such file")
        if path is not None and not zipfile.is_zipfile(path):
            raise InputError(f"--ckpt_path {path}: not a checkpoint, or a damaged one")

    def before_instantiate_classes(self) -> None:
        """Make `predict` keep no samples in memory, because the writer saves them."""
        if self.subcommand == "predict" and self.config.predict.return_predictions is None:
            self.config.predict.return_predictions = False

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Show progress over the whole run, unless the options set another bar or no bar; record a training run."""
        options = self._get(self.config_init, "trainer")
        callbacks = options["callbacks"] or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if options["enable_progress_bar"] is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks = [*callbacks, StepProgressBar()]
        if self.subcommand == "fit" and not any(isinstance(c, RunRecord) for c in callbacks):
            callbacks = [*callbacks, RunRecord()]
        try:
            trainer = super().instantiate_trainer(**{"callbacks": callbacks, **kwargs})
        except (ValueError, RuntimeError) as error:  # The options do not fit together.
            raise InputError(f"trainer: {' '.join(str(error).split())}") from error
        _check_processes(trainer)
        return trainer


def make_cli(args: Sequence[str] | None = None, run: bool = True) -> CLI:
    """Parse a command line and run it, or only instantiate model, data and trainer.

    Args:
        args: subcommand and options; only options if `run` is False; `sys.argv` if None.
        run: False instantiates only.
    """
    raising = {"exit_on_error": False}  # so that `main` can print the error in one line
    description = "Train and evaluate diffusion models. `main.py report RUN...` puts training runs side by side."
    return CLI(
        pl.LightningModule,
        pl.LightningDataModule,
        trainer_class=Trainer,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        trainer_defaults={"default_root_dir": "runs"},
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            **raising,
            "description": description,
            **(dict.fromkeys(CLI.subcommands(), raising) if run else {}),
        },
        args=None if args is None else list(args),
        run=run,
    )


def with_config_of_run(args: Sequence[str]) -> list[str]:
    """Insert the configuration of the run into the command line `best --run RUN …`, before the other options.

    Raises:
        InputError: the run's folder has no configuration of a training run.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run")
    run = parser.parse_known_args(list(args[1:]))[0].run if args and args[0] == "best" else None
    if run is None:
        return list(args)
    config = {name: value for name, value in config_of_run(run).items() if name in PARTS_OF_A_RUN}
    return ["best", "-c", yaml.safe_dump(config), *args[1:]]


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line; bad input ends it with one line and exit status 2."""
    # With their current folder in `sys.path`, users can name classes from its files.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    given = sys.argv[1:] if args is None else args
    if given and given[0] == "report":  # It reads files, and needs neither a model nor data nor a trainer.
        report.main(given[1:])
        return
    try:
        make_cli(args)
    except (ValueError, argparse.ArgumentError, MisconfigurationException, NonFiniteLossError) as error:
        message = _message(error)
        if message is None:
            raise
        rank = rank_zero_only.rank  # type: ignore[attr-defined]
        if rank == 0:
            print(f"error: {message}", file=sys.stderr)
        # Other ranks print, too: each machine has its own files, each rank its own loss, and rank 0 may be lost.
        elif _is_first_of_machine() or isinstance(error, (NonFiniteLossError, LostProcessError)) or _is_first_alive():
            print(f"error: rank {rank}: {message}", file=sys.stderr)
        raise SystemExit(2) from error


def _check_processes(trainer: pl.Trainer) -> None:
    """Refuse options with which each process of a launcher would train its own model."""
    asked = trainer.num_devices * trainer.num_nodes
    if torch.distributed.is_torchelastic_launched():
        launcher, started = "torchrun", int(os.environ["WORLD_SIZE"])
        fits = started == asked and trainer.num_devices == int(os.environ["LOCAL_WORLD_SIZE"])
    elif SLURMEnvironment.detect():
        launcher, started = "srun", int(os.environ["SLURM_NTASKS"])
        fits = started == asked
    else:
        return
    if not fits:
        raise InputError(
            f"{launcher} has started {started} processes, but trainer.num_nodes={trainer.num_nodes} and "
            f"trainer.devices={trainer.num_devices} ask for {asked}: give the machines and the processes of each"
        )


def _is_first_of_machine() -> bool:
    """Tell whether this process is the first that torchrun or SLURM started on its machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID")) == "0"


def _is_first_alive() -> bool:
    """Tell whether the first process still runs a second after this one failed. If so, this process prints its error.

    If the first process failed too, it has printed the error. Torchrun then ends this process; with Lightning, the
    first process was the parent of this one, so the parent changes.
    """
    parent = os.getppid()
    time.sleep(1)
    return os.getppid() == parent


def _seed(value: Any) -> int:
    if value is None or value is True or value < 0:
        raise InputError(f"--seed_everything must be a number of at least 0, got {value}")
    return int(value)


def _message(error: BaseException) -> str | None:
    """Return the message for the user, in one line, or None if the error is not about the input."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, InputError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return str(cause)
    if isinstance(error, argparse.ArgumentError):
        return _condense(str(error))
    said = isinstance(error, (MisconfigurationException, NonFiniteLossError))
    return " ".join(str(error).split()) if said else None


def _condense(message: str) -> str:
    """Shorten a parser's long message to one line with the option, the reason and the value."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip()]
    keys = [line.split('"')[1] for line in lines if line.startswith("Parser key")]
    option = ".".join(dict.fromkeys(keys))
    reasons = dict.fromkeys(line for line in lines if not line.startswith(FRAMES))
    values = [line.removeprefix("Given value: ") for line in lines if line.startswith("Given value: ")]
    new = values and not values[-1].startswith("NestedArg") and values[-1] not in message.split("Given value")[0]
    value = f" (given: {values[-1]})" if new else ""
    return (f"--{option}: " if option else "") + ("; ".join(reasons) or " ".join(lines)) + value


if __name__ == "__main__":
    main()
