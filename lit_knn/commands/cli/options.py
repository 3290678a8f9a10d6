"""The options of the commands that make a model, data and a trainer: which there are, and what is checked."""

import argparse
from collections.abc import Sequence

import yaml
from jsonargparse import Namespace
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from lit_knn.callbacks import LastCheckpoint, SampleWriter
from lit_knn.commands.cli import checkpoint_option, trainer_options
from lit_knn.commands.cli.arguments import as_dict, check_linked, completed
from lit_knn.commands.cli.from_data import fill_network
from lit_knn.commands.cli.messages import refusal
from lit_knn.commands.cli.packaged_configs import with_packaged_configs
from lit_knn.commands.cli.samples import SAMPLES_HELP, set_samples
from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError

# Every run has these callbacks. Their options begin with these names.
OF_EVERY_RUN = {"last_checkpoint": LastCheckpoint, "sample_writer": SampleWriter}

# These commands neither train nor read a checkpoint of a run.
MEASURES = ("best", "probe")

# Lightning also seeds NumPy, whose seeds have 32 bits.
LARGEST_SEED = 2**32 - 1


class OptionsCLI(LightningCLI):
    """Lightning's command line with one seed for everything, and with checks before any long work."""

    # The command, if the command line begins with one.
    called: str | None = None

    # The content of the checkpoint until Lightning loads it, or why it cannot be read.
    checkpoint: Content | None = None
    unreadable: InputError | None = None

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands without `test`, but with ours."""
        commands = LightningCLI.subcommands()
        del commands["test"]
        for name in ("plan", *MEASURES):
            commands[name] = {"model", "datamodule"}
        return commands

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **options: object
    ) -> LightningArgumentParser:
        """Add options only to the called subcommand, if it is known. Options for all would double the start time."""
        if self.called not in (None, subcommand):
            return self.init_parser(**options)

        parser = super()._prepare_subcommand_parser(klass, subcommand, **options)
        if subcommand not in LightningCLI.subcommands():
            # The help shows the groups in this order: after -h and -c the options of the command alone.
            *groups, of_command = parser._action_groups
            parser._action_groups = [*groups[:2], of_command, *groups[2:]]
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link `--seed_everything` to the seeds of model and data; add the options of the callbacks of every run."""
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_seed)
        for option, callback in OF_EVERY_RUN.items():
            parser.add_lightning_class_args(callback, option)
        parser.add_argument("--samples", type=int | None, default=None, help=SAMPLES_HELP)

    def parse_arguments(self, parser: LightningArgumentParser, args: Sequence[str]) -> None:  # type: ignore[override]
        """Parse the arguments, check them, and put numbers of the data in the place of null options."""
        self.command_line = list(args)
        args = with_packaged_configs(args)
        check_linked(args)

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
        """Check the checkpoint before any long work; `last` is the newest complete checkpoint with the run's name.

        In Lightning's version, the options saved in the checkpoint override the command line.
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
            # Only this machine may lack the file: the others would wait for it in vain.
            self.unreadable = error

    def _options_to_save(self) -> dict[str, object]:
        """Return the options as the run's config.yaml will have them."""
        text = self.parser.dump(self.config, skip_none=False)
        return dict(yaml.safe_load(text)[self.config.subcommand])


def _seed(value: bool | int | None) -> int:
    """Return the common seed of model and data, which must be a number."""
    if value is None or value is True or not 0 <= value <= LARGEST_SEED:
        raise InputError(
            f"--seed_everything must be a number from 0 to {LARGEST_SEED}, got {value}"
        )
    return int(value)
