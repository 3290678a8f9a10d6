"""Ends a failed command with one line: what is wrong, and where it arose."""

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_knn.common.errors import (
    InputError,
    NonFiniteLossError,
    causes,
    first_line,
    joined_lines,
    printable,
)
from lit_knn.common.extras import missing
from lit_knn.common.memory import is_out_of_memory

PACKAGE = Path(__file__).parents[1]
# The paths of this program's source files begin with one of these. In a checkout without links, the callbacks lie
# beside the package.
FILES_OF_LIT_KNN = (f"{PACKAGE}/", f"{PACKAGE.parent}/callbacks/")


def one_line(error: BaseException, doing: str = "") -> tuple[str, int]:
    """Return a one-line message for an error, and the exit status: 2 for bad input, 1 for a fault of the program.

    The message is that of an `InputError` among the causes. An unexpected error says what the program was `doing`.
    """
    for cause in causes(error):
        if isinstance(cause, InputError):
            return printable(str(cause)), 2
    if isinstance(error, ImportError):
        advice = missing(error)
        if advice:
            return advice, 2
    for cause in causes(error):
        if is_out_of_memory(cause):
            message = f"not enough memory: {joined_lines(cause)}; `plan` shows what a run needs"
            return printable(message), 2

    if isinstance(error, OSError):
        return printable(f"{_files_of(error)}: {first_line(error)}"), 2
    if is_lost(error):
        return "another process ended in training; resume from the last checkpoint", 2
    # Compare the name of Lightning's class, because this module does not import Lightning.
    if isinstance(error, NonFiniteLossError) or type(error).__name__ == "MisconfigurationException":
        return printable(joined_lines(error)), 2

    return printable(f"{_place_and_message(error, doing)} (the traceback: --debug)"), 1


def _files_of(error: OSError) -> str:
    """Name the files of a system error, or say that it has to do with files."""
    names = [str(name) for name in (error.filename, error.filename2) if name]
    return ": ".join(names) or "a file cannot be read or written"


def _place_and_message(error: BaseException, doing: str) -> str:
    """Say what the program was doing, the plug-in or part in which an error arose, and the error."""
    # The parser wraps the error of a constructor in one with the class's options.
    while error.__cause__ is not None:
        error = error.__cause__

    # The notes name the parts in which a plug-in failed, the innermost first.
    parts = getattr(error, "__notes__", None) or [_plug_in(error)]
    words = [doing, *reversed(parts), type(error).__name__, joined_lines(error)]
    return ": ".join(filter(None, words))


def _plug_in(error: BaseException) -> str:
    """Name the innermost function of a user's plug-in that an error left, or return ''.

    Such a function is neither of this program nor of a package.
    """
    paths = sysconfig.get_paths()
    # Code without a file has a name such as "<string>".
    not_of_users = (*FILES_OF_LIT_KNN, paths["stdlib"], paths["purelib"], paths["platlib"], "<")

    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(not_of_users):
            name = frame.f_code.co_qualname
    return name


def is_lost(error: BaseException) -> bool:
    """Return whether a collective failed because another process ended. PyTorch's message names its source file."""
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


@contextmanager
def errors_in_one_line(doing: str = "", debug: bool = False) -> Iterator[None]:
    """End a command that fails with one line, and exit status 2 if its input is bad; `debug` shows the traceback."""
    try:
        yield
    except Exception as error:
        message, status = one_line(error, doing)
        if debug:
            traceback.print_exc()
        sys.stdout.flush()  # Progress bars end their line there.
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(status) from error
