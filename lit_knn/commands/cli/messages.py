"""Shortens the parser's long error messages to one line, in words."""

import difflib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_knn.commands.cli.packaged_configs import hint_of_part
from lit_knn.common.errors import InputError, causes

# A parser's message has these lines around the actual reason, which has the deepest indentation.
FRAMES = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Parser key",
    "Problem with given class_path",
    "Subclass types expect",
    "a class path (str)",
    "a dict with",
)
# If there is another reason, these lines only report that another reading of the value failed.
VAGUE = (
    "Expected a path but",
    "Expected a <class 'NoneType'>",
    "Expected a <class 'bool'>",
    "Not a valid subclass of",
)
LONGEST_VALUE = 200
KEY = re.compile(r'Parser key "([\w.+]+)"')
GIVEN = re.compile(r"Given value: (.*)")
NO_PATH = re.compile(r"Expected a path but (\S+) either")
NO_CLASS = re.compile(r"(?:Expected a dot import path string|Unexpected import path format): (\S+)")
NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
NO_OBJECT = re.compile(r"Expected an instantiatable class, but ([\w.]+) is abstract")
OWNER = re.compile(r"Problem with given class_path '[\w.]*?(\w+)'")
# The parser's word for a type, in `Expected a <class 'int'>. Got value: many`.
EXPECTED = re.compile(
    r"Expected a (?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.*?)\])(?:\. Got value: (.*))?",
)
NOT_A_SHARE = re.compile(r"Not of type Share: .*")
A_LIST = "a list, such as [1, 2]"
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
WORDS |= {"str": "text", "NoneType": "null"}
WORDS |= dict.fromkeys(("list", "tuple", "Sequence", "Iterable"), A_LIST)
WORDS |= dict.fromkeys(("dict", "Mapping"), "names with values, such as {a: 1}")
REQUIRED = re.compile(r"the following arguments are required: (.+)")
QUOTES = "; put a text like this into two pairs of quotes, such as \"'[a]'\""
PURPOSES = {"fit": "train", "validate": "measure", "predict": "sample from"}


def refusal(error: Exception) -> InputError:
    """Explain a parser's error in one line: the option, the reason and the value."""
    for cause in causes(error):
        if isinstance(cause, InputError):
            return cause
    return InputError(condense(str(error)))


def condense(message: str) -> str:
    """Shorten a parser's long message to one line with the option, the reason and the value."""
    if missing := REQUIRED.fullmatch(message):
        return _missing(missing[1].split(", "))

    reasons = _reasons(message)
    option = ".".join(dict.fromkeys(KEY.findall(message)))
    begin = f"--{option}: " if option else ""
    value = _given_value(message)
    if words := _in_words(reasons, value):
        # The parser reads some names of classes as a list, or as names with values.
        is_name = option.endswith("sampling_class") and words.startswith("must be text")
        hint = QUOTES if is_name else ""
        return f"{begin}{words}{hint}"

    reason = "; ".join(reasons)
    said = _explained(reason)
    owners = OWNER.findall(message.partition(reasons[0])[0])
    if option == "trainer.callbacks" and owners:
        said = f"{owners[-1]}: {said}"
    is_told = value.startswith(("NestedArg", "Namespace", "[<")) or value in reason
    return f"{begin}{said}" if is_told else f"{begin}{said} (given: {value[:LONGEST_VALUE]})"


def _reasons(message: str) -> list[str]:
    """Return the lines of a message that say what is wrong: the deepest, without vague ones."""
    lines = [line for line in message.splitlines() if line.strip()]
    depths = {line: len(line) - len(line.lstrip(" -")) for line in lines}
    inner = [line for line in lines if not line.strip(" -").startswith(FRAMES)] or lines
    deepest = max(depths[line] for line in inner)
    said = list(dict.fromkeys(line.strip(" -") for line in inner if depths[line] == deepest))

    clear = [line for line in said if not line.startswith(VAGUE)]
    # A callback in place of the list of callbacks has no options.
    with_options = [line for line in clear if not line.endswith("; it has none")]
    return with_options or clear or said


def _given_value(message: str) -> str:
    """Return the value that the user gave, as text, or an empty text."""
    values = NO_PATH.findall(message) + GIVEN.findall(message)
    typed = [value for value in values if not value.startswith("NestedArg")]
    return (typed or values or [""])[0]


def _in_words(reasons: Sequence[str], typed: str) -> str:
    """Say which values are allowed, if all reasons are types; or return an empty text.

    Next to a number, the reason that no class has the name of the value does not count.
    """
    types = [match for reason in reasons if (match := EXPECTED.fullmatch(reason))]
    shares = [reason for reason in reasons if NOT_A_SHARE.fullmatch(reason)]
    no_classes = [reason for reason in reasons if NO_CLASS.fullmatch(reason)]
    names = {match[1] for match in types}
    counted = len(types) + len(shares)
    if names & {"int", "float"}:
        counted += len(no_classes)
    if not types or counted < len(reasons):
        return ""

    allowed = ["a share, such as 0.5"] if shares else []
    for match in types:
        if match[1]:
            allowed.append(WORDS.get(match[1], match[1]))
        else:
            allowed += [choice.strip("' ") for choice in match[2].split(",")]
    value = typed
    if not value or value.startswith("NestedArg"):
        value = next((match[3] for match in types if match[3]), "")
    choices = " or ".join(dict.fromkeys(allowed))
    return f"must be {choices}, got {value[:LONGEST_VALUE]}{_whole(value, names)}"


def _whole(value: str, names: set[str]) -> str:
    """Return how to write a whole number like 1e3, if a whole number is asked for."""
    try:
        is_whole = "int" in names and float(value).is_integer()
    except ValueError:
        return ""
    return f"; write {int(float(value))}" if is_whole else ""


def _explained(reason: str) -> str:
    """Add to a reason what to do: the nearest name, or where a file must be."""
    if reason.startswith("No module named"):
        return f"{reason}; a file of your own must be in the current folder"

    if absent := NO_ATTRIBUTE.fullmatch(reason):
        return f"{reason}{_similar_in_module(*absent.groups())}"

    if NO_OBJECT.fullmatch(reason):
        return "there is no object that could have this option: give a class first"

    unknown = [match for part in reason.split("; ") if (match := NO_CLASS.fullmatch(part))]
    if unknown:
        return f"{unknown[0][1]} is neither a class nor a file{_similar(unknown[0][1])}"
    return reason


def _similar_in_module(module: str, name: str) -> str:
    """Return what to add to the message that a module lacks a name: the nearest class or name."""
    contents = vars(sys.modules[module])
    classes = {known.lower(): known for known, thing in contents.items() if inspect.isclass(thing)}
    near = [classes[known] for known in difflib.get_close_matches(name.lower(), classes, n=1)]
    near = near or difflib.get_close_matches(name, contents, n=1)
    return f"; did you mean {module}.{near[0]}?" if near else ""


def _similar(name: str) -> str:
    """Return what to add to the message that a class is unknown: the nearest class or config."""
    from pytorch_lightning import loggers  # They take seconds to import.
    from torch import optim

    from lit_knn import callbacks, data, estimators, index, modules, nets

    rooms = (loggers, optim, callbacks, data, estimators, index, modules, nets)
    classes = {known.lower(): known for room in rooms for known in room.__all__}
    near = difflib.get_close_matches(Path(name).stem.lower(), classes, n=1)
    return f"; did you mean {classes[near[0]]}?" if near and "/" not in name else hint_of_part(name)


def _missing(names: Sequence[str]) -> str:
    """Say what to give for required options; the parser calls them `fit.data`, or `data` alone."""
    command = names[0].rpartition(".")[0]
    missing = [name.rpartition(".")[2] for name in names]
    if "run" in missing:
        return "--run is missing: give the folder of a training run, such as runs/demo/knn_0"

    options = " and ".join(f"--{name}" for name in missing)
    if len(missing) == 1:
        return f"{options} is missing: give it, or a config that has it, such as -c demo"
    purpose = PURPOSES.get(command, "use")
    return f"say what to {purpose}: -c demo, or -c and a file of yours; {options} are missing"
