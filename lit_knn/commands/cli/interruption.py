"""Ends an interrupted command: prints how to resume the run, and returns the exit status."""

import os
import shlex
import signal
import sys
from collections.abc import Sequence

from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lit_knn.runs.interruption import RunInterrupted


def interrupted(stop: BaseException, args: Sequence[str]) -> BaseException:
    """Print how to resume an interrupted run, and return the exception that exits with the shell's status."""
    if isinstance(stop, RunInterrupted):
        said = f"interrupted by {signal.Signals(stop.signum).name} after step {stop.step}; "
        if stop.checkpoint is None:
            said += "no checkpoint was saved"
        else:
            said += f"to go on: {_resuming(args, stop.checkpoint)}"
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
