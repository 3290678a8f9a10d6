"""The application: `python main.py fit|validate|predict -c configs/….yaml`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

# Imported so that the command line knows classes by their bare names: `--data ImageFiles`, `--model.help LitICT`.
import lit_knn.data
import lit_knn.ict
import lit_knn.nets  # noqa: F401
from callbacks import StepProgressBar
from lit_knn.errors import InputError


class CLI(LightningCLI):
    """LightningCLI with one seed for everything."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """`--seed_everything` also keys the random streams of the model and the order of the data."""
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)

    def before_instantiate_classes(self) -> None:
        """Look for the checkpoint before anything long begins."""
        path = self._get(self.config, "ckpt_path")
        if path is not None and path not in ("best", "last", "hpc") and "://" not in path and not Path(path).exists():
            raise InputError(f"--ckpt_path {path}: no such file")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Show progress over the whole run, unless another bar, or none, was asked for."""
        options = self._get(self.config_init, "trainer")
        callbacks = options["callbacks"] or []
        if options["enable_progress_bar"] is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks = [*callbacks, StepProgressBar()]
        return super().instantiate_trainer(**{"callbacks": callbacks, **kwargs})


def make_cli(args: Sequence[str] | None = None, run: bool = True) -> CLI:
    """Parse a command line and, if `run`, carry it out; otherwise instantiate model, data and trainer only.

    Args:
        args: subcommand and options, without the subcommand if not `run`; `sys.argv` if None.
        run: whether to carry out the subcommand.
    """
    options: dict[str, Any] = {"trainer_defaults": {"default_root_dir": "runs"}, "seed_everything_default": 0}
    return CLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=None if args is None else list(args),
        run=run,
        **options,
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line; bad input ends it with one line and exit status 2."""
    try:
        make_cli(args)
    except ValueError as error:
        cause = _input_error_behind(error)
        if cause is None:
            raise
        print(f"error: {cause}", file=sys.stderr)
        raise SystemExit(2) from error


def _input_error_behind(error: BaseException | None) -> InputError | None:
    """The parser wraps what a constructor raises: find the message meant for the user."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


if __name__ == "__main__":
    main()
