"""Runs one command line: hides what does not matter, and ends it as a shell expects after a signal or an error."""

import logging
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.common.errors import OURS, LostProcessError, NonFiniteLossError, is_lost, one_line
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
# Each rank has its own loss, and only the remaining ranks notice a lost rank.
ALWAYS_SAID = (NonFiniteLossError, LostProcessError)


def main(args: Sequence[str]) -> None:
    """Run one command line. The first rank raises its errors; another rank prints its error only if no other does."""
    # Users can name classes from files in the current folder; it comes first, before any installed `utils`.
    if sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, os.getcwd())
    if all(os.environ.get(size, "1") == "1" for size in SIZES):
        rank_zero_only.rank = 0  # type: ignore[attr-defined]  # Another launcher may have left its rank behind.
    try:
        with _quiet():
            make_cli(args)
    except (KeyboardInterrupt, SystemExit) as stop:
        raise _interrupted(stop, args) from None
    except Exception as error:
        rank = rank_zero_only.rank  # type: ignore[attr-defined]
        if rank == 0:
            raise
        message, status = one_line(error, args[0])
        # Each machine has its own files, each rank its own loss, and rank 0 may be lost.
        first_of_machine = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID")) == "0"
        if (
            first_of_machine
            or isinstance(error, ALWAYS_SAID)
            or is_lost(error)
            or _first_is_alive()
        ):
            print(f"error: rank {rank}: {message}", file=sys.stderr)
        raise SystemExit(status) from error


def _first_is_alive() -> bool:
    """Return whether the first process still runs a second after this one failed; then this one prints its error.

    Otherwise torchrun ends this process, or the first process was the parent of this one, so the parent changes.
    """
    parent = os.getppid()
    time.sleep(1)
    return os.getppid() == parent


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Lightning's messages that do not matter for a run of this program, and the place of our own warnings."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    formatted = warnings.formatwarning

    def without_place(
        message: Any, category: type[Warning], filename: str, *place: Any, **more: Any
    ) -> str:
        if issubclass(category, UserWarning) and filename.startswith(OURS):
            return f"warning: {message}\n"
        return formatted(message, category, filename, *place, **more)

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


def _interrupted(stop: BaseException, args: Sequence[str]) -> BaseException:
    """Print how to resume an interrupted run, and return the exception that exits with the shell's status."""
    if isinstance(stop, RunInterrupted):
        goes_on = (
            f"to go on: {_resuming(args, stop.checkpoint)}"
            if stop.checkpoint
            else "no checkpoint was saved"
        )
        said = (
            f"interrupted by {signal.Signals(stop.signum).name} after step {stop.step}; {goes_on}"
        )
        status = stop.code
    elif isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt):
        said, status = "interrupted", 128 + signal.SIGINT
    elif isinstance(stop, SIGTERMException):
        said, status = "interrupted by SIGTERM", 128 + signal.SIGTERM
    else:
        return stop
    # A launcher kills the first process as soon as another fails, perhaps before the first has printed this.
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return SystemExit(0)
    print(f"\n{said}", file=sys.stderr)
    return SystemExit(status)


def _resuming(args: Sequence[str], checkpoint: str) -> str:
    """Return the command line that resumes from the checkpoint."""
    kept, skip = [], False
    for arg in args:
        if not skip and not arg.startswith("--ckpt_path"):
            kept.append(arg)
        skip = arg == "--ckpt_path"
    return shlex.join(["lit-knn", *kept, "--ckpt_path", os.path.relpath(checkpoint)])
