"""Ends an interrupted command: says how the run goes on, and returns the exit status."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lit_knn.runs.interruption import RunInterrupted


def interrupted(stop: BaseException, args: Sequence[str]) -> BaseException:
    """Say how an interrupted run goes on, and return the exception that ends the command with the shell's status."""
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
    # A launcher kills the first process as soon as another fails, perhaps before it has said this.
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
    return shlex.join([*_program(), *kept, "--ckpt_path", os.path.relpath(checkpoint)])


def _program() -> list[str]:
    """Return the words that start this program: `lit-knn`, `python -m lit_knn` or `python main.py`.

    Where the environment of this Python is not active, as after `make demo`, they have its path.
    """
    path, python = Path(sys.argv[0]), _found_as("python", sys.executable)
    if path.name == "__main__.py":
        return [python, "-m", "lit_knn"]
    return [python, sys.argv[0]] if path.suffix == ".py" else [_found_as(path.name, sys.argv[0])]


def _found_as(name: str, path: str) -> str:
    """Return the name of a program if the shell finds it by that name, else its path."""
    found = shutil.which(name)
    if found is not None and os.path.abspath(found) == os.path.abspath(path):
        return name
    inside = Path(path).absolute().is_relative_to(Path.cwd())
    return os.path.relpath(path) if inside else path
