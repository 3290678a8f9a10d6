"""Shortens the parser's long error messages to one line."""

import difflib
import re
import sys
from pathlib import Path

from lit_knn.commands.cli.packaged_configs import hint_of_part
from lit_knn.common.errors import InputError, causes

# A parser's message has these lines around the actual reason, which has the deepest indentation.
FRAMES = (
    *("Does not validate", "Subtypes:", "Errors:", "Given value", "Parser key", "Problem with given class_path"),
    *("Subclass types expect", "a class path (str)", "a dict with"),
)
# If there is another reason, these lines only report that another reading of the value failed.
VAGUE = ("Expected a path but", "Expected a <class 'NoneType'>", "Expected a <class 'bool'>", "Not a valid subclass of")
LONGEST_VALUE = 200
KEY = re.compile(r'Parser key "([\w.+]+)"')
NO_CLASS = re.compile(r"(?:Expected a dot import path string|Unexpected import path format): (\S+)")
NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
OWNER = re.compile(r"Problem with given class_path '[\w.]*?(\w+)'")


def refusal(error: Exception) -> InputError:
    """Explain a parser's error in one line: the option, the reason and the value."""
    own = next((cause for cause in causes(error) if isinstance(cause, InputError)), None)
    return own or InputError(condense(str(error)))


def condense(message: str) -> str:
    """Shorten a parser's long message to one line with the option, the reason and the value."""
    lines = [(len(line) - len(line.lstrip(" -")), line.strip(" -")) for line in message.splitlines() if line.strip()]
    found = [(depth, line) for depth, line in lines if not line.startswith(FRAMES)] or lines
    said = [line for depth, line in found if depth == max(depth for depth, _ in found)]
    reasons = list(dict.fromkeys(line for line in said if not line.startswith(VAGUE))) or said
    reason = "; ".join(reasons)
    if reason.startswith("No module named"):
        reason += "; a file of your own must be in the current folder"
    if absent := NO_ATTRIBUTE.fullmatch(reason):
        near = difflib.get_close_matches(absent[2], vars(sys.modules[absent[1]]), n=1)
        reason += "".join(f"; did you mean {absent[1]}.{name}?" for name in near)
    if unknown := NO_CLASS.fullmatch(reason):
        reason = f"{unknown[1]} is neither a class nor a file{_similar(unknown[1])}"
    option = ".".join(dict.fromkeys(KEY.findall(message)))
    if option == "trainer.callbacks" and (owners := OWNER.findall(message.partition(reasons[0])[0])):
        reason = f"{owners[-1]}: {reason}"
    values = [line.removeprefix("Given value: ") for _, line in lines if line.startswith("Given value: ")]
    value = next(iter([*re.findall(r"Expected a path but (\S+) either", message), *values[-1:]]), "")
    told = value.startswith(("NestedArg", "Namespace", "[<")) or value in reason
    given = "" if told else f" (given: {value[:LONGEST_VALUE]})"
    return (f"--{option}: " if option else "") + reason + given


def _similar(name: str) -> str:
    """Return what to add to the message that a class is unknown: the nearest class or config of lit_knn."""
    from lit_knn import data, estimators, modules, nets  # They take seconds to import.

    classes = {known.lower(): known for room in (data, estimators, modules, nets) for known in room.__all__}
    near = difflib.get_close_matches(Path(name).stem.lower(), classes, n=1)
    return f"; did you mean {classes[near[0]]}?" if near and "/" not in name else hint_of_part(name)
