"""The options of the commands that make a model, data and a trainer, and the checks of these options."""

import argparse
from collections.abc import Sequence

import yaml
from jsonargparse import Namespace
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from lit_knn.callbacks import LastCheckpoint, SampleWriter
from lit_knn.commands.cli import checkpoint_option, trainer_options
from lit_knn.commands.cli.arguments import (
    LEFT_OUT,
    as_dict,
    check_left_out,
    check_linked,
    completed,
)
from lit_knn.commands.cli.from_data import fill_network
from lit_knn.commands.cli.messages import refusal
from lit_knn.commands.cli.packaged_configs import with_packaged_configs
from lit_knn.commands.cli.samples import SAMPLES_HELP, set_samples
from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError

# The callbacks of every run, by the names that their options begin with.
CALLBACKS_OF_EVERY_RUN = {"last_checkpoint": LastCheckpoint, "sample_writer": SampleWriter}

# These commands make no folder of a run and have no --ckpt_path.
MEASURES = ("best", "probe")

# Lightning also seeds NumPy, whose seeds have 32 bits.
LARGEST_SEED = 2**32 - 1


class OptionsCLI(LightningCLI):
    """Lightning's command line with one seed for everything, and with checks before any long work."""

    # The command, if the command line begins with one.
    called: str | None = None

    # The content of the checkpoint until Lightning loads it, and the error if it cannot be read.
    checkpoint: Content | None = None
    unreadable: InputError | None = None

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands, Lightning's without `test` and those of this project, with names of their arguments.

        The parser makes no options for these arguments.
        """
        commands = LightningCLI.subcommands()
        del commands["test"]
        for name in ("plan", *MEASURES):
            commands[name] = {"model", "datamodule"}
        return commands

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **options: object
    ) -> LightningArgumentParser:
        """Return the parser of a command; if another command was called, it has no options, which saves start time."""
        if self.called not in (None, subcommand):
            return self.init_parser(**options)

        parser = super()._prepare_subcommand_parser(klass, subcommand, **options)
        if subcommand not in LightningCLI.subcommands():
            # The help shows the groups in this order. The options of this command alone come directly after -h and -c.
            *groups, of_command = parser._action_groups
            parser._action_groups = [*groups[:2], of_command, *groups[2:]]
        for option in LEFT_OUT.get(subcommand, ()):
            parser.add_argument(f"--{option}", default=None, help=argparse.SUPPRESS)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of this project: the common seed, the callbacks of every run, and `--samples`."""
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_seed)
        for option, callback in CALLBACKS_OF_EVERY_RUN.items():
            parser.add_lightning_class_args(callback, option)
        parser.add_argument("--samples", type=int | None, default=None, help=SAMPLES_HELP)

    def parse_arguments(self, parser: LightningArgumentParser, args: Sequence[str]) -> None:  # type: ignore[override]
        """Parse the arguments, check them, and fill the network's null options with numbers of the data."""
        self.command_line = list(args)
        args = with_packaged_configs(args)
        check_linked(args)
        check_left_out(args)

        try:
            self.config = parser.parse_args(completed(args))
        except argparse.ArgumentError as error:
            raise refusal(error) from error

        command = self.config.get("subcommand")
        options = self.config if command is None else self.config[command]
        if not isinstance(options["trainer"], Namespace):
            raise InputError("trainer holds no options: it must have lines like `max_steps: 1000`")

        set_samples(options, command)
        fill_network(options)
        trainer_options.check(as_dict(options), command)

    def _parse_ckpt_path(self) -> None:
        """Find the checkpoint of `--ckpt_path`, and check it before any long work.

        This replaces Lightning's method, which lets options in the checkpoint override the command line.
        """
        command = self.config.get("subcommand")
        if command in (None, *MEASURES):
            return

        options = self.config[command]
        model = options.model.class_path
        checkpoint_option.check_path(options.ckpt_path, command, model)
        try:
            options.ckpt_path, self.checkpoint = checkpoint_option.read(
                options.ckpt_path, command, self._options_to_save
            )
        except InputError as error:
            if options.trainer.num_nodes == 1:
                raise
            # If only this machine lacks the file, the others would wait for it in vain. So the error is raised later,
            # when the processes can tell each other.
            self.unreadable = error

    def _options_to_save(self) -> dict[str, object]:
        """Return the options of the command as the run's config.yaml will have them."""
        text = self.parser.dump(self.config, skip_none=False)
        return dict(yaml.safe_load(text)[self.config.subcommand])


def _seed(value: bool | int | None) -> int:
    """Return the seed of model and data; raise InputError if `--seed_everything` is no number in the range."""
    if value is None or value is True or not 0 <= value <= LARGEST_SEED:
        raise InputError(
            f"--seed_everything must be a number from 0 to {LARGEST_SEED}, got {value}"
        )
    return int(value)
