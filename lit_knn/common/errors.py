"""Errors that end a run with one line."""

import math
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from lit_knn.common.extras import missing
from lit_knn.common.memory import is_out_of_memory

PACKAGE = Path(__file__).parents[1]
# The paths of this program's source files begin with one of these. In a checkout without links, the callbacks lie
# beside the package.
FILES_OF_LIT_KNN = (f"{PACKAGE}/", f"{PACKAGE.parent}/callbacks/")


class InputError(ValueError):
    """Bad input. The message has one line: the option or file, the value, and the rule that it breaks.

    `lit-knn` prints it without a traceback; a library call gets an ordinary `ValueError`.
    """


class NonFiniteLossError(RuntimeError):
    """A loss in training is NaN or infinite."""


@contextmanager
def prefixed(owner: str) -> Iterator[None]:
    """Put `owner`, the name of what gets the bad input, before the message of an `InputError`.

    Other exceptions get the name as a note.
    """
    try:
        yield
    except InputError as error:
        raise type(error)(f"{owner}: {error}") from error
    except Exception as error:
        error.add_note(owner)
        raise


def check_at_least(least: int, **options: float) -> None:
    """Refuse options that are no whole numbers, or below `least`."""
    for name, value in options.items():
        # With "not", NaN is refused, too.
        if not value >= least:
            raise InputError(f"{name} must be at least {least}, got {value}")
        if not math.isfinite(value) or value != math.floor(value):
            raise InputError(f"{name} must be a whole number, got {value!r:.80}")


def check_not_negative(**options: float) -> None:
    """Refuse options that are not finite, or below 0."""
    for name, value in options.items():
        if not 0 <= value < math.inf:
            raise InputError(f"{name} must be at least 0 and finite, got {value!r:.80}")


def check_positive(**options: float) -> None:
    """Refuse options that are not finite and above 0."""
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name} must be finite and above 0, got {value!r:.80}")


@contextmanager
def reading(what: object, kind: str = "", advice: str = "") -> Iterator[None]:
    """Turn any error of the block into an InputError: damaged files raise errors of many types.

    Args:
        what: the file, or the part of a file that is read.
        kind: what the file is read as, such as " as a zip file".
        advice: what the user can do.
    """
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        # A library may fail at another file than this one, such as one of its cache.
        place = ""
        if isinstance(error, OSError) and error.filename is not None:
            # The name may also be bytes or the number of an open file.
            other = str(error.filename)
            if f"/{Path(other).name}" not in f"/{what}":
                place = f"{other}: "
        problem = f"{what} cannot be read{kind}: {place}{first_line(error):.300}{advice}"
        raise InputError(problem) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a system error's number and path, or its class name."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror

    lines = message.splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


def joined_lines(error: BaseException) -> str:
    """Return the whole message of an error in one line."""
    return " ".join(str(error).split())


def class_and_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message: what to tell of an error in code of others."""
    return f"{type(error).__name__}: {first_line(error)}"


def nearest(name: str | None, known: Iterable[str], prefix: str = "") -> str:
    """Return a question to add to a message, with the known name nearest to an unknown one; "" if none is near.

    Args:
        name: the unknown name.
        known: the names that there are.
        prefix: text before the known name in the message.
    """
    near = get_close_matches(name or "", known, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def printable(text: str) -> str:
    """Escape line breaks and control characters, so that no terminal obeys them.

    Names of files may contain them.
    """
    characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


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


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its chain of causes, each once. An error that was raised twice may cause itself."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


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
