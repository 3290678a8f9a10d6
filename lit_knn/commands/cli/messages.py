"""Shortens the parser's long error messages to one line."""

import re

from lit_knn.common.errors import InputError, causes

# A parser's message has these lines around the actual reason, which has the deepest indentation.
FRAMES = (
    *("Does not validate", "Subtypes:", "Errors:", "Given value", "Parser key", "Problem with given class_path"),
    *("Subclass types expect", "a class path (str)", "a dict with"),
)
# If there is another reason, these lines only report that another reading of the value failed.
VAGUE = ("Expected a path but", "Expected a <class 'NoneType'>", "Not a valid subclass of")
LONGEST_VALUE = 200
KEY = re.compile(r'Parser key "([\w.+]+)"')
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
    option = ".".join(dict.fromkeys(KEY.findall(message)))
    if option == "trainer.callbacks" and (owners := OWNER.findall(message.partition(reasons[0])[0])):
        reason = f"{owners[-1]}: {reason}"
    values = [line.removeprefix("Given value: ") for _, line in lines if line.startswith("Given value: ")]
    value = next(iter([*re.findall(r"Expected a path but (\S+) either", message), *values[-1:]]), "")
    told = value.startswith(("NestedArg", "Namespace")) or value in reason
    given = "" if told else f" (given: {value[:LONGEST_VALUE]})"
    return (f"--{option}: " if option else "") + reason + given
