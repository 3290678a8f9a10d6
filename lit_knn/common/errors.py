"""Errors of bad input, checks that raise them, and words for messages."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path


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


def check_is(kind: type, value: object, noun: str) -> None:
    """Refuse a value that is no instance of a class: a class or its name is easily given in place of an object.

    Args:
        kind: the class.
        value: what was given.
        noun: what is needed, in words.
    """
    if isinstance(value, kind):
        return
    if isinstance(value, type):
        name = value.__name__
        raise InputError(f"the class {name} is no {noun}: give an object, {name}(...)")
    raise InputError(f"{value!r:.80} is no {noun}")


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


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its chain of causes, each once. An error that was raised twice may cause itself."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
