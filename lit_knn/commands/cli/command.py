"""Runs one command line: hides needless messages, and sets the exit status after a signal or an error."""

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
from lit_knn.commands.own_network import import_from_current_folder
from lit_knn.common.one_line import FILES_OF_LIT_KNN, one_line
from lit_knn.runs.interruption import EXIT_STATUS_OF_SIGNALS, RunInterrupted

# The beginnings of warnings to hide. With these, Lightning and PyTorch warn about their own code, or about what this
# program does on purpose.
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
# The beginnings of messages to hide: advertisements for other products, and reports that nothing happened.
LINES = ("💡 Tip", "TPU available: False", "Found current_model_state in the checkpoint")
LOGGERS = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero")

# Launchers set the number of processes in these variables.
SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "JSM_NAMESPACE_SIZE")


def main(args: Sequence[str]) -> None:
    """Run one command line.

    An error of the first rank is raised. Another rank prints its error with its number before it exits,
    because launchers end all processes as soon as one fails.
    """
    import_from_current_folder()
    # A process on its own is the first, even if the environment has a rank from another launcher.
    if all(os.environ.get(size, "1") == "1" for size in SIZES):
        rank_zero_only.rank = 0  # type: ignore[attr-defined]

    try:
        with quiet():
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
    """Return the rank of this process, which Lightning sets."""
    return int(rank_zero_only.rank)  # type: ignore[attr-defined]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide needless messages of Lightning and PyTorch, and show this project's warnings without their place in it."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    formatted = warnings.formatwarning

    def without_place(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        """Return the text of a warning as Python formats it, or of a warning of this project as one line."""
        if issubclass(category, UserWarning) and filename.startswith(FILES_OF_LIT_KNN):
            return f"warning: {message}\n"
        return formatted(message, category, filename, lineno, line)

    warnings.formatwarning = without_place
    with warnings.catch_warnings():
        for beginning in WARNINGS:
            warnings.filterwarnings("ignore", message=beginning)
        for logger in loggers:
            logger.addFilter(_is_needed)
        try:
            yield
        finally:
            warnings.formatwarning = formatted
            for logger in loggers:
                logger.removeFilter(_is_needed)


def _is_needed(record: logging.LogRecord) -> bool:
    """Return whether a message of Lightning is none of `LINES`."""
    return not record.getMessage().startswith(LINES)


def _ended(stop: BaseException, args: Sequence[str]) -> BaseException:
    """Print how a run was interrupted, and return the exception that ends the process with the shell's exit status.

    Args:
        stop: the exception that ended the run. One that is no interruption is returned as it is.
        args: the command line.
    """
    # Lightning raises SystemExit while it handles a Ctrl-C.
    is_ctrl_c = isinstance(stop, KeyboardInterrupt) or isinstance(
        stop.__context__, KeyboardInterrupt
    )
    status: int | str | None
    if isinstance(stop, RunInterrupted):
        message, status = _interrupted(stop, args), stop.code
    elif is_ctrl_c:
        message, status = "interrupted", EXIT_STATUS_OF_SIGNALS + signal.SIGINT
    elif isinstance(stop, SIGTERMException):
        message, status = "interrupted by SIGTERM", EXIT_STATUS_OF_SIGNALS + signal.SIGTERM
    else:
        return stop

    # Other ranks exit without an error: a launcher would end the first process for it, perhaps before it has printed.
    if _rank() != 0:
        return SystemExit(0)
    print(f"\n{message}", file=sys.stderr)
    return SystemExit(status)


def _interrupted(stop: RunInterrupted, args: Sequence[str]) -> str:
    """Return a message with the step after which a signal interrupted a training, and the command that resumes it."""
    message = f"interrupted by {signal.Signals(stop.signum).name} after step {stop.step}"
    if not stop.checkpoint:
        return f"{message}; no checkpoint was saved"

    checkpoint = os.path.relpath(stop.checkpoint)
    command = ["lit-knn", *without(args, ["ckpt_path"]), "--ckpt_path", checkpoint]
    return f"{message}; to go on: {shlex.join(command)}"
