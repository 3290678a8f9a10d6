"""Shortens the parser's long error messages to one line, in words."""

import re
from collections.abc import Sequence

from lit_knn.commands.cli.suggestions import NO_CLASS, with_suggestion
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
    missing = REQUIRED.fullmatch(message)
    if missing:
        return _missing(missing[1].split(", "))

    option = ".".join(dict.fromkeys(KEY.findall(message)))
    line = f"--{option}: " if option else ""
    reasons = _reasons(message)
    value = _typed_value(message)
    rule = _rule_of_types(reasons, value)
    if rule:
        line += rule
        # The parser reads some names of classes as a list, or as names with values.
        if option.endswith("sampling_class") and rule.startswith("must be text"):
            line += QUOTES
        return line

    if option == "trainer.callbacks":
        owners = OWNER.findall(message.partition(reasons[0])[0])
        if owners:
            line += f"{owners[-1]}: "

    reason = "; ".join(reasons)
    line += with_suggestion(reason)
    # An object of the parser says nothing to a user.
    is_object = value.startswith(("NestedArg", "Namespace", "[<"))
    if not is_object and value not in reason:
        line += f" (given: {value[:LONGEST_VALUE]})"
    return line


def _reasons(message: str) -> list[str]:
    """Return the lines of a message that say what is wrong: the deepest, without vague ones."""
    lines = [line for line in message.splitlines() if line.strip()]
    inner = [line for line in lines if not line.strip(" -").startswith(FRAMES)]
    if not inner:
        inner = lines

    deepest = max(_depth(line) for line in inner)
    reasons = []
    for line in inner:
        reason = line.strip(" -")
        if _depth(line) == deepest and reason not in reasons:
            reasons.append(reason)

    clear = [reason for reason in reasons if not reason.startswith(VAGUE)]
    # A callback in place of the list of callbacks has no options.
    with_options = [reason for reason in clear if not reason.endswith("; it has none")]
    return with_options or clear or reasons


def _depth(line: str) -> int:
    """Return the width of the indentation of a line, dashes included."""
    return len(line) - len(line.lstrip(" -"))


def _typed_value(message: str) -> str:
    """Return the value as the user typed it, or an empty text."""
    values = NO_PATH.findall(message) + GIVEN.findall(message)
    for value in values:
        if not value.startswith("NestedArg"):
            return value
    return values[0] if values else ""


def _rule_of_types(reasons: Sequence[str], value: str) -> str:
    """Say which values are allowed, if all reasons are types; or return an empty text.

    Next to a number, the reason that no class has the name of the value does not count.
    """
    types: list[re.Match[str]] = []
    shares = 0
    no_classes = 0
    for reason in reasons:
        expected = EXPECTED.fullmatch(reason)
        if expected:
            types.append(expected)
        elif NOT_A_SHARE.fullmatch(reason):
            shares += 1
        elif NO_CLASS.fullmatch(reason):
            no_classes += 1

    names = {expected[1] for expected in types}
    of_types = len(types) + shares
    if names & {"int", "float"}:
        of_types += no_classes
    if not types or of_types < len(reasons):
        return ""

    if not value or value.startswith("NestedArg"):
        value = _value_of_types(types)
    allowed = _allowed(types)
    if shares:
        allowed = ["a share, such as 0.5", *allowed]
    choices = " or ".join(dict.fromkeys(allowed))
    rule = f"must be {choices}, got {value[:LONGEST_VALUE]}"
    if "int" in names:
        rule += _whole(value)
    return rule


def _value_of_types(types: Sequence[re.Match[str]]) -> str:
    """Return the first value that a reason repeats, or an empty text."""
    for expected in types:
        if expected[3]:
            return expected[3]
    return ""


def _allowed(types: Sequence[re.Match[str]]) -> list[str]:
    """Put the expected types into words. A literal type is the list of its choices."""
    allowed = []
    for expected in types:
        if expected[1]:
            allowed.append(WORDS.get(expected[1], expected[1]))
        else:
            for choice in expected[2].split(","):
                allowed.append(choice.strip("' "))
    return allowed


def _whole(value: str) -> str:
    """Return how to write a whole number like 1e3."""
    try:
        number = float(value)
    except ValueError:
        return ""
    return f"; write {int(number)}" if number.is_integer() else ""


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
