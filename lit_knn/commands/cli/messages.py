"""The one line that tells a user what is wrong."""

import argparse
import inspect
import pkgutil
import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args, get_type_hints

from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lit_knn.common.errors import InputError, NonFiniteLossError, file_problem
from lit_knn.common.extras import missing
from lit_knn.common.memory import is_out_of_memory

# A parser's message has these lines around the actual reason.
FRAMES = (
    *("Does not validate", "Subtypes:", "Errors:", "Given value", "Parser key", "Problem with given class_path"),
    *("Expected a <class 'NoneType'>", "Subclass types expect one of", "a class path (str)", "a dict with"),
    "a dict without class_path",
)
# These lines say only that another reading of the value failed, if there is another reason.
VAGUE = ("Expected a path but", "Not a valid subclass of")
LONGEST_VALUE = 200
OWN_MODULE = "; a file of your own must be in the current folder"
NO_CLASS_PATH = "Expected a dot import path string"
# The parser gives an option after this one to the last callback of the list.
CALLBACKS = "trainer.callbacks"
OWNER = re.compile(r"Problem with given class_path '([\w.]+)'")
OWN_CLASS = re.compile(r"<class '(lit_knn\.[\w.]+)'>")


def message_of(error: BaseException) -> str | None:
    """Return the message for the user, in one line, or None if the error is not about the input."""
    for cause in _causes(error):
        if isinstance(cause, InputError):
            return str(cause)
    if isinstance(error, argparse.ArgumentError):
        return condense(str(error))
    if isinstance(error, ImportError) and (lacking := missing(error)):
        return lacking
    if is_out_of_memory(error):
        return f"not enough memory: {_in_one_line(error)}; `plan` shows what a run needs"
    if isinstance(error, OSError):
        return file_problem(error)
    if is_lost(error):
        return "another process ended in training; resume from the last checkpoint"
    told = isinstance(error, (MisconfigurationException, NonFiniteLossError)) or _is_refused_by_lightning(error)
    return _in_one_line(error) if told else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that, and so on. An error that was raised twice may cause itself."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


@contextmanager
def quiet_threads() -> Iterator[None]:
    """Print no traceback of a thread whose file cannot be written. Its owner meets the same error, and tells it."""
    shown = threading.excepthook

    def show(args: Any) -> None:
        if not isinstance(args.exc_value, OSError):
            shown(args)

    threading.excepthook = show
    try:
        yield
    finally:
        threading.excepthook = shown


def _is_refused_by_lightning(error: BaseException) -> bool:
    """Tell whether Lightning's own checks raised the error: some options are checked only when a run begins."""
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
    return isinstance(error, ValueError) and module.startswith(("pytorch_lightning.trainer", "pytorch_lightning.loops"))


def is_lost(error: BaseException) -> bool:
    """Tell whether a collective failed because another process has ended. PyTorch names its own source file."""
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


def condense(message: str) -> str:
    """Shorten a parser's long message to one line with the option, the reason and the value."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip()]
    keys = [line.split('"')[1] for line in lines if line.startswith("Parser key")]
    option = ".".join(dict.fromkeys(keys))
    reasons = list(dict.fromkeys(line for line in lines if not line.startswith(FRAMES)))
    reasons = [line for line in reasons if not line.startswith(VAGUE)] or reasons
    reasons = [f"{line}{OWN_MODULE}" if line.startswith("No module named") else line for line in reasons]
    values = [line.removeprefix("Given value: ") for line in lines if line.startswith("Given value: ")]
    paths = re.findall(r"Expected a path but (\S+) either", message)
    value = (paths or values or [""])[-1]
    told = value.startswith(("NestedArg", "Namespace")) or value in "; ".join(reasons)
    given = f" (given: {value[:LONGEST_VALUE]})" if value and not told else ""
    known = _known_classes(lines, keys) if any(line.startswith(NO_CLASS_PATH) for line in reasons) else []
    choices = f"; known by name: {', '.join(known)}" if known else ""
    owner = OWNER.search(message)
    refused = [line for line in reasons if line.startswith("Option '")]
    if option == CALLBACKS and owner and refused:
        # The parser asks the callback, and then the base class, too.
        name = owner[1].rpartition(".")[2]
        reasons = [f"{name}: {refused[0]}"]
        if value.startswith("NestedArg"):
            choices = "; an option there is of the callback that was added last"
    return (f"--{option}: " if option else "") + ("; ".join(reasons) or " ".join(lines)) + given + choices


def _known_classes(lines: list[str], keys: list[str]) -> list[str]:
    """Return the names of the classes of this package that an option takes.

    The parser tells their base, or the class that has the option `keys[-1]`.
    """
    bases = [
        pkgutil.resolve_name(name) for line in lines if line.startswith("Subtypes:") for name in OWN_CLASS.findall(line)
    ]
    owners = [match[1] for line in lines if (match := OWNER.search(line))]
    if not bases and owners and keys:
        hint = get_type_hints(pkgutil.resolve_name(owners[-1]).__init__).get(keys[-1])
        bases = [kind for kind in get_args(hint) or (hint,) if getattr(kind, "__module__", "").startswith("lit_knn.")]
    if not bases:
        return []
    found, left = set(), [bases[-1]]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind.__module__.startswith("lit_knn.") and not inspect.isabstract(kind):
            found.add(kind.__name__)
    return sorted(found)


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
