"""Errors that end a run with one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input. The message has one line: the option or file, the value, and the rule that it breaks.

    `lit-knn` prints it without a traceback; a library call gets an ordinary `ValueError`.
    """


class NonFiniteLossError(RuntimeError):
    """A loss in training is NaN or infinite. The message names the step and the noise level."""


class LostProcessError(InputError):
    """Another process of the run has ended without a message, so the others report it."""


@contextmanager
def prefixed(owner: str) -> Iterator[None]:
    """Put `owner`, the receiver of the bad input, before the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{owner}: {error}") from error


def first_line(error: BaseException) -> str:
    """Describe an error in one line, by the system's words without number and path, or by the name of its class."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (said.splitlines() or [type(error).__name__])[0]


def file_problem(error: OSError) -> str:
    """Describe an error of the file system in one line, with the files that it names."""
    names = [str(name) for name in (error.filename, error.filename2) if name]
    return ": ".join([*(names or ["a file cannot be read or written"]), first_line(error)])


def printable(text: str) -> str:
    """Write line breaks and control characters, as file names may hold, as escapes, so that no terminal obeys them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """End a command with one line and exit status 2 if its input is bad, or a file cannot be read or written."""
    try:
        yield
    except (InputError, OSError) as error:
        told = file_problem(error) if isinstance(error, OSError) else str(error)
        print(f"error: {printable(told)}", file=sys.stderr)
        raise SystemExit(2) from error
