"""Explains an error of the parser in one line: the option, the reason and the nearest name that exists."""

from types import ModuleType

from lit_knn.commands.cli.suggestions import nearest_class
from lit_knn.common.errors import InputError, causes, joined_lines, nearest

# The parser chains its errors. Each outer one begins with this text, followed by one part of the option's name.
KEY = 'Parser key "'
# Beginnings of the reason that a value is no class; the value follows.
NO_CLASS = ("Expected a dot import path string", "Unexpected import path format")
MISSING = "the following arguments are required: "
# The largest number of letters of a reason.
LONGEST_REASON = 400
# Plain words for the parser's names of types.
WORDS = {
    "a <class 'int'>": "a whole number",
    "a <class 'float'>": "a number",
    "a <class 'bool'>": "true or false",
    "a <class 'str'>": "text",
    "a <class 'list'>": "a list",
    "a <class 'collections.abc.Sequence'>": "a list, such as [1, 2]",
    "a typing.Literal": "one of ",
}


def refusal(error: Exception) -> InputError:
    """Return an InputError that explains a parser's error in one line."""
    parts = []
    for cause in causes(error):
        if isinstance(cause, InputError):
            return cause
        if isinstance(cause, TypeError) and str(cause).startswith(KEY):
            parts.append(str(cause).split('"')[1])
        innermost = cause  # The last of the chained errors has the reason.

    reason = _reason(innermost)
    if not parts:
        return InputError(_with_advice(reason))
    return InputError(f"--{'.'.join(parts)}: {reason}")


def _reason(error: BaseException) -> str:
    """Return the reason of an error in plain words, with the nearest name that exists if a name is unknown."""
    reason = joined_lines(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{reason}; a file of your own must be in the current folder"

    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        module = error.obj
        known = [name for name, value in vars(module).items() if not isinstance(value, ModuleType)]
        return reason + nearest(error.name, known, f"{module.__name__}.")

    if reason.startswith(NO_CLASS):
        value = reason.partition(": ")[2]
        return f"{value} is neither a class nor a file{nearest_class(value)}"

    for type_name, words in WORDS.items():
        reason = reason.replace(type_name, words)
    if len(reason) > LONGEST_REASON:
        return f"{reason[:LONGEST_REASON]} …"
    return reason


def _with_advice(reason: str) -> str:
    """Return a reason with advice on where to get options if some are missing."""
    if not reason.startswith(MISSING):
        return reason
    if ".run" in reason:
        return f"{MISSING}--run, the folder of a training run, such as runs/demo/knn_0"
    return f"{reason}; give a config that has them: -c demo, or -c and a file of yours"
