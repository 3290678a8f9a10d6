"""Makes the command line: the names that it knows, the defaults of its trainer, and the options of its parsers."""

import importlib
import sys
from collections.abc import Sequence

import pytorch_lightning as pl
import yaml
from jsonargparse import set_loader
from pytorch_lightning.cli import LightningCLI

from lit_knn.callbacks import RunRecord, RunSummary
from lit_knn.commands.cli import replaced
from lit_knn.commands.cli.cli import CLI
from lit_knn.commands.cli.parser import Parser, load
from lit_knn.commands.cli.save_config import SaveConfig
from lit_knn.commands.entry import COMMANDS
from lit_knn.commands.trainer import Trainer

# The parser finds a class by its bare name (`--data ImageFiles`, `--model.help LitICT`) only if its module is imported.
NAMED = ["data.modules", "data.images", "data.latents", "modules", "nets"]
NAMED += ["modules.augmentation", "modules.time_distributions"]
for module in NAMED:
    importlib.import_module(f"lit_knn.{module}")
set_loader("yaml", load, exceptions=(yaml.YAMLError,))
replaced.set_rule()

# Validations are counted in batches, not in epochs, because an epoch of a small set takes only a second.
TRAINER_DEFAULTS = {
    "default_root_dir": "runs",
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "val_check_interval": 1000,
}

DEBUG_HELP = "--debug: also show the traceback of an error"


def make_cli(args: Sequence[str] | None = None, run: bool = True) -> CLI:
    """Parse a command line, make model, data and trainer, and run the command.

    Args:
        args: the command line after `lit-knn`; by default that of this process.
        run: run the command. Without it, `args` are options with no command, and nothing is run.
    """
    command_line = list(sys.argv[1:] if args is None else args)
    called = None
    if run and command_line and command_line[0] in CLI.subcommands():
        called = command_line[0]

    # Lightning takes the arguments of the common parser and, under the name of each command, those of its parser.
    parser_arguments: dict[str, object] = {
        "exit_on_error": False,
        "epilog": DEBUG_HELP,
        "allow_abbrev": False,
    }
    if run:
        parser_arguments |= _parser_arguments_by_command(parser_arguments)

    return CLI(
        pl.LightningModule,
        pl.LightningDataModule,
        called=called,
        trainer_class=Trainer,
        parser_class=Parser,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        trainer_defaults={**TRAINER_DEFAULTS, "callbacks": [RunRecord(), RunSummary()]},
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        parser_kwargs=parser_arguments,
        args=command_line,
        run=run,
    )


def _parser_arguments_by_command(common: dict[str, object]) -> dict[str, dict[str, object]]:
    """Return, for each command, the keyword arguments of its parser: the common ones, usage and description."""
    by_command = {}
    for name in CLI.subcommands():
        arguments = dict(common)
        arguments["usage"] = "%(prog)s [-c CONFIG ...] [--OPTION VALUE ...]"
        # The help shows the docstring of the trainer's method. Of Lightning's methods it would describe its Trainer.
        if name in LightningCLI.subcommands():
            arguments["description"] = COMMANDS[name].capitalize()
        by_command[name] = arguments
    return by_command
