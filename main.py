"""The application: `python main.py fit|validate|predict -c configs/….yaml`."""

import sys
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from lit_knn.errors import InputError


class CLI(LightningCLI):
    """LightningCLI with one seed for everything."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """`--seed_everything` also keys the random streams of the model and the order of the data."""
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)


def make_cli(args: Sequence[str] | None = None, run: bool = True) -> CLI:
    """Parse a command line and, if `run`, carry it out; otherwise instantiate model, data and trainer only.

    Args:
        args: subcommand and options; `sys.argv` if None.
        run: whether to carry out the subcommand.
    """
    options: dict[str, Any] = {"trainer_defaults": {"default_root_dir": "runs"}, "seed_everything_default": 0}
    args = list(sys.argv[1:] if args is None else args)
    return CLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=args if run else args[1:],
        run=run,
        **options,
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line; bad input ends it with one line and exit status 2."""
    try:
        make_cli(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
