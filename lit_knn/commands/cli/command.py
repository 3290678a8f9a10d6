"""Runs one command line: hides what does not matter, and ends it as a shell expects after a signal or an error."""

import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.commands.next_run import without
from lit_knn.common.errors import OURS, one_line
from lit_knn.runs.interruption import RunInterrupted

# Starts of warnings of Lightning and PyTorch about their own code, or about things that this program does on purpose.
WARNINGS = (
    # `torch.func.jvp` loads PyTorch's own rules of forward derivatives.
    r"`torch\.jit\.script` is deprecated",
    # Lightning calls PyTorch's own tree functions.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # A run may be resumed into another folder; our checkpoint callbacks keep no best score.
    "The dirpath has changed from",
    # A resumed run goes on in its folder. `LastCheckpoint` refuses to overwrite a longer run.
    "Checkpoint directory .* exists and is not empty",
    # The table of the earlier part has been renamed.
    "Experiment logs directory .* exists and is not empty",
    # `validate` and `predict` need no callback that wrote the checkpoint.
    "Be aware that when using `ckpt_path`,",
    # The batches of `predict` are seeds.
    "Couldn't infer the batch indices fetched from your dataloader: `SeedBatches`",
)
# Advertisements for other products, and reports that nothing happened.
LINES = ("💡 Tip", "TPU available: False", "Found current_model_state in the checkpoint")
LOGGERS = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero")

# Launchers set the number of processes in these variables.
SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "JSM_NAMESPACE_SIZE")


def main(args: Sequence[str]) -> None:
    """Run one command line. The first rank raises its error; another rank prints it with the number of the rank.

    Launchers end all other processes as soon as one fails. So each says its error before it ends.
    """
    # Users can name classes from files in the current folder; it comes first, before any installed `utils`.
    if sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, os.getcwd())
    if all(os.environ.get(size, "1") == "1" for size in SIZES):
        rank_zero_only.rank = 0  # type: ignore[attr-defined]  # Another launcher may have left its rank behind.

    try:
        with _quiet():
            make_cli(args)
    except (KeyboardInterrupt, SystemExit) as stop:
        raise _ended(stop, args) from None
    except Exception as error:
        if _rank() == 0:
            raise
        message, status = one_line(error, args[0])
        print(f"error: rank {_rank()}: {message}", file=sys.stderr)
        raise SystemExit(status) from error


def _rank() -> int:
    """Return the number of this process among those of the run, which Lightning sets."""
    return int(rank_zero_only.rank)  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Lightning's messages that do not matter for a run of this program, and the place of our own warnings."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    formatted = warnings.formatwarning

    def without_place(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        """Format a warning like Python, but ours as one line without its place in the source."""
        if issubclass(category, UserWarning) and filename.startswith(OURS):
            return f"warning: {message}\n"
        return formatted(message, category, filename, lineno, line)

    warnings.formatwarning = without_place
    with warnings.catch_warnings():
        for beginning in WARNINGS:
            warnings.filterwarnings("ignore", message=beginning)
        for logger in loggers:
            logger.addFilter(_says_something)
        try:
            yield
        finally:
            warnings.formatwarning = formatted
            for logger in loggers:
                logger.removeFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LINES)


def _ended(stop: BaseException, args: Sequence[str]) -> BaseException:
    """Say how a run was interrupted, and return the exception that exits with the shell's status."""
    is_ctrl_c = isinstance(stop, KeyboardInterrupt) or isinstance(
        stop.__context__, KeyboardInterrupt
    )
    status: int | str | None
    if isinstance(stop, RunInterrupted):
        message, status = _interrupted(stop, args), stop.code
    elif is_ctrl_c:
        message, status = "interrupted", 128 + signal.SIGINT
    elif isinstance(stop, SIGTERMException):
        message, status = "interrupted by SIGTERM", 128 + signal.SIGTERM
    else:
        return stop

    # A launcher kills the first process as soon as another fails, perhaps before the first has printed this.
    if _rank() != 0:
        return SystemExit(0)
    print(f"\n{message}", file=sys.stderr)
    return SystemExit(status)


def _interrupted(stop: RunInterrupted, args: Sequence[str]) -> str:
    """Say after which step a signal interrupted a training, and which command goes on."""
    message = f"interrupted by {signal.Signals(stop.signum).name} after step {stop.step}"
    if not stop.checkpoint:
        return f"{message}; no checkpoint was saved"

    checkpoint = os.path.relpath(stop.checkpoint)
    command = ["lit-knn", *without(args, ["ckpt_path"]), "--ckpt_path", checkpoint]
    return f"{message}; to go on: {shlex.join(command)}"
