"""The parser of the command line: it reads YAML strictly, suggests options, lists our networks, and makes objects."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jsonargparse
import yaml
from pytorch_lightning.cli import LightningArgumentParser
from torch import nn

from lit_knn import nets
from lit_knn.commands.cli.packaged_configs import with_packaged_parts
from lit_knn.commands.cli.suggestions import hint_of_argument, nearest
from lit_knn.common.errors import InputError, first_line
from lit_knn.modules.conditioning import NULLS

T = TypeVar("T")

NETWORKS = re.compile(r"known\s+subclasses:\s+torch\.nn\.Module\b[^)]*")
# Beginnings of the parser's messages.
UNKNOWN_ARGUMENT = "unrecognized arguments: "
UNKNOWN_OPTION = "Option '"
# The loader's message for a tab, among others.
NO_TOKEN = "found character that cannot start any token"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_load_yaml = jsonargparse.get_loader("yaml")
# These options are names. YAML reads some names in a file as something else: 010 as 8, yes as true.
NAMES = ("sampling_class",)


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

    # A second check of a configuration takes as long as parsing. Lightning gives `skip_none` its old name.

    def save(self, *args: Any, skip_none: bool = False, **options: Any) -> None:
        super().save(*args, skip_unset=skip_none, skip_validation=True, **options)

    def dump(self, *args: Any, skip_none: bool = False, **options: Any) -> str:
        options.setdefault("skip_unset", skip_none)
        options.setdefault("skip_validation", True)
        return super().dump(*args, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error of this parser; say which option may be meant by an unknown argument."""
        if message.startswith(UNKNOWN_ARGUMENT):
            argument = message.removeprefix(UNKNOWN_ARGUMENT).partition(" ")[0]
            message += hint_of_argument(argument, self.get_defaults().keys())
        super().error(message, ex)

    def validate(self, *args: Any, **options: Any) -> None:
        """Check values; say which option may be meant by one that the class does not have."""
        try:
            super().validate(*args, **options)
        except KeyError as error:
            message = str(error)
            if message.startswith(UNKNOWN_OPTION):
                error.args = (message + self._nearest(message.split("'")[1]),)
            raise

    def _nearest(self, option: str) -> str:
        """Say which option of the class is nearest, or which it has."""
        options = sorted(vars(self.get_defaults()))
        return nearest(option, options) or f"; it has {', '.join(options) or 'none'}"


def construct(kind: Callable[..., T], *args: object, **options: object) -> T:
    """Make an object of a class; if a class that is not ours fails, an error names it in one line."""
    try:
        return kind(*args, **options)
    except Exception as error:
        if kind.__module__.startswith("lit_knn.") or isinstance(error, (InputError, OSError)):
            raise
        raise InputError(f"{kind.__name__}: {type(error).__name__}: {first_line(error)}") from error


def load(text: str, path: str | None = None) -> object:
    """Load a file or a value like the parser's own loader, but refuse a repeated key.

    Args:
        text: the YAML.
        path: the file after `-c`; None for a value or another file, whose name the parser adds to a `YAMLError`.
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
    """Return whether the options of a part, or those of its class, have a seed."""
    if not isinstance(options, dict):
        return False
    return "seed" in options or "seed" in (options.get("init_args") or {})


def _of_text(text: str, value: object) -> object:
    """Return the value of an option's text.

    `None` means null, too. What YAML takes for a comment, such as #3, is a text.
    """
    if text.strip() in NULLS:
        return None
    return text if value is None else value


def _keep_names(node: yaml.Node | None, value: object) -> None:
    """Replace, in place, the values of options that are names by their text; null stays."""
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        for part, item in zip(node.value, value, strict=False):
            _keep_names(part, item)

    if isinstance(node, yaml.MappingNode) and isinstance(value, dict):
        for key, part in node.value:
            name = str(key.value)
            option = value.get(name)
            if name not in NAMES or option is None or not isinstance(part, yaml.ScalarNode):
                _keep_names(part, option)
            elif part.value in NULLS:
                # In quotes of YAML, null is a text. The parser reads each text once more.
                value[name] = f"'{part.value}'"
            else:
                value[name] = part.value


def _refuse_double_keys(node: yaml.Node | None) -> None:
    """Refuse a repeated key, because the parser would keep only the last one."""
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
