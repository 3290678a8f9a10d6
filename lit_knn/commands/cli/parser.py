"""The parser of the command line: it reads YAML strictly, and suggests an option if one is unknown."""

import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jsonargparse
import yaml
from pytorch_lightning.cli import LightningArgumentParser
from torch import nn

from lit_knn import nets
from lit_knn.commands.cli.packaged_configs import with_packaged_parts
from lit_knn.commands.cli.suggestions import hint_of_argument
from lit_knn.common.errors import InputError, class_and_line, nearest
from lit_knn.modules.conditioning import NULLS
from lit_knn.runs.names import options_in

T = TypeVar("T")

# Finds the list of all subclasses of `torch.nn.Module` in the help.
NETWORKS = re.compile(r"known\s+subclasses:\s+torch\.nn\.Module\b[^)]*")
# Beginnings of messages of the parser.
UNKNOWN_ARGUMENT = "unrecognized arguments: "
UNKNOWN_OPTION = "Option '"
# The loader's message for a tab, and for other characters.
NO_TOKEN = "found character that cannot start any token"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_load_yaml = jsonargparse.get_loader("yaml")
# Some callbacks of Lightning have defaults of an Enum, such as Timer's interval, which YAML writes as their values.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, each: dumper.represent_data(each.value))
# The values of these options are names, but YAML reads some names in a file as something else: 010 as 8, yes as true.
OPTIONS_WITH_NAMES = ("sampling_class",)


class Parser(LightningArgumentParser):
    """Lightning's parser, also for the options of a class (`--model.help LitICT`)."""

    def format_help(self, *args: Any) -> str:
        """List the classes of `lit_knn.nets` where the parser lists every subclass of `torch.nn.Module`."""
        lines = ["classes:"]
        for name in nets.__all__:
            kind = getattr(nets, name)
            if isinstance(kind, type) and issubclass(kind, nn.Module):
                lines.append(f"lit_knn.nets.{kind.__name__}")
        lines.append("or your own: mine.Net of mine.py in this folder; see docs/extending.md")

        indented = ("\n" + " " * 24).join(lines)
        return NETWORKS.sub(indented, super().format_help(*args))

    # Lightning calls `save` and `dump` with the old name `skip_none` of an argument. Both skip the check of the
    # configuration, which was checked when it was parsed, and which takes as long as parsing.

    def save(self, *args: Any, skip_none: bool = False, **options: Any) -> None:
        """Write a configuration to a file without checking it again."""
        super().save(*args, skip_unset=skip_none, skip_validation=True, **options)

    def dump(self, *args: Any, skip_none: bool = False, **options: Any) -> str:
        """Return a configuration as text without checking it again."""
        options.setdefault("skip_unset", skip_none)
        options.setdefault("skip_validation", True)
        return super().dump(*args, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error of this parser, with the nearest option if an argument is unknown."""
        if message.startswith(UNKNOWN_ARGUMENT):
            argument = message.removeprefix(UNKNOWN_ARGUMENT).partition(" ")[0]
            message += hint_of_argument(argument, self.get_defaults().keys())
        super().error(message, ex)

    def validate(self, *args: Any, **options: Any) -> None:
        """Check values; the error of an option that a class does not have gets the nearest one that it has."""
        try:
            super().validate(*args, **options)
        except KeyError as error:
            message = str(error)
            if message.startswith(UNKNOWN_OPTION):
                error.args = (message + self._nearest(message.split("'")[1]),)
            raise

    def _nearest(self, option: str) -> str:
        """Return words on the option of the class that is nearest to an unknown one, or on all that it has."""
        options = sorted(vars(self.get_defaults()))
        return nearest(option, options) or f"; it has {', '.join(options) or 'none'}"


def construct(kind: Callable[..., T], *args: object, **options: object) -> T:
    """Make an object of a class; raise InputError with the name of a class from outside this project that fails."""
    try:
        return kind(*args, **options)
    except Exception as error:
        if kind.__module__.startswith("lit_knn.") or isinstance(error, (InputError, OSError)):
            raise
        raise InputError(f"{kind.__name__}: {class_and_line(error)}") from error


def load(text: str, path: str | None = None) -> object:
    """Return the content of a file or the value of an option, read as YAML without repeated keys.

    Args:
        text: the YAML.
        path: the file after `-c`; None for a value or another file, whose name the parser adds to a `YAMLError`.

    Raises:
        InputError: the file is bad YAML, holds no options, or sets a seed of model or data.
    """
    try:
        node = yaml.compose(text, Loader=LOADER)
        _refuse_double_keys(node)
        value = _load_yaml(text)
        _keep_names(node, value)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if path is None or mark is None:
            raise
        problem = error.problem or error.context
        if problem == NO_TOKEN and "\t" in text.splitlines()[mark.line]:
            problem = "a tab; YAML takes spaces alone"
        raise InputError(f"{path}, line {mark.line + 1}: {problem}") from error

    if path is None:
        return _of_text(text, value)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no options: it must have lines like `trainer:`")
    for part in ("model", "data"):
        # The common seed would replace it.
        if _has_seed(value.get(part)):
            raise InputError(f"{path}: {part}.seed is set by seed_everything: give that option")
    return with_packaged_parts(value, Path(path).parent)


def _has_seed(options: object) -> bool:
    """Return whether there is a seed among the options of a part, or of its class."""
    if not isinstance(options, dict):
        return False
    return "seed" in options or "seed" in options_in(options)


def _of_text(text: str, value: object) -> object:
    """Return the value that the text of an option on the command line means.

    Args:
        text: the text. A word for null, also Python's `None`, means None.
        value: what YAML reads in it. YAML reads None in a comment, such as #3, which is meant as text.
    """
    if text.strip() in NULLS:
        return None
    return text if value is None else value


def _keep_names(node: yaml.Node | None, value: object) -> None:
    """Replace, in place, the values of `OPTIONS_WITH_NAMES` by their text in the file; null stays.

    Args:
        node: what YAML has parsed, with the text of each value.
        value: the same with its values.
    """
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        for part, item in zip(node.value, value, strict=False):
            _keep_names(part, item)

    if isinstance(node, yaml.MappingNode) and isinstance(value, dict):
        for key, part in node.value:
            name = str(key.value)
            option = value.get(name)
            is_name = name in OPTIONS_WITH_NAMES and isinstance(part, yaml.ScalarNode)
            if not is_name or option is None:
                _keep_names(part, option)
            elif part.value in NULLS:
                # The parser reads each text once more. Without quotes, it would read this one as null.
                value[name] = f"'{part.value}'"
            else:
                value[name] = part.value


def _refuse_double_keys(node: yaml.Node | None) -> None:
    """Raise YAML's error for a repeated key, of which the loader would keep only the last value."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_double_keys(item)

    if isinstance(node, yaml.MappingNode):
        names = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    twice = f"the key {key.value} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, twice, key.start_mark)
                names.add(key.value)
            _refuse_double_keys(value)
