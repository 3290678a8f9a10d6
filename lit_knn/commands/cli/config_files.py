"""Reads YAML strictly: a repeated key is an error, and errors name the file and the line."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from lit_knn.commands.cli.packaged_configs import CONFIG_OPTIONS, hint, hint_of_part, with_packaged_parts
from lit_knn.common.errors import InputError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SUFFIXES = (".yaml", ".yml")
_load_yaml = jsonargparse.get_loader("yaml")


def load(text: str, path: str | None = None) -> Any:
    """Load a file or a value like the parser's own loader, but refuse a repeated key.

    `None` also means null, because the parser turns null into `None` inside nested options.

    Args:
        text: YAML.
        path: the file after `-c`; None for another file or for a value. A value need not be YAML.

    Raises:
        InputError: the file after `-c` is not YAML, has a key twice, or has no options.
        yaml.YAMLError: the same faults without `path`. The parser then adds the file, or takes the value as text.
    """
    try:
        _refuse_double_keys(yaml.compose(text, Loader=LOADER))
        value = _load_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if path is None or mark is None:
            raise
        raise InputError(f"{path}, line {mark.line + 1}: {error.problem or error.context}") from error
    if path is not None and not isinstance(value, dict):
        raise InputError(f"{path} holds no options: it must have lines like `trainer:`")
    if path is not None:
        return with_packaged_parts(value, Path(path).parent)
    return None if value == "None" else value


jsonargparse.set_loader("yaml", load, exceptions=(yaml.YAMLError,))


def check_files_exist(args: Sequence[str]) -> None:
    """Refuse an option whose file is missing, and list the nearest names of our configs; the parser lists none."""
    for option, value in _values(args):
        path, is_config = Path(value), option in CONFIG_OPTIONS
        is_text = any(mark in value for mark in ("{", ": ", ":\n"))
        if is_text or not (is_config or path.suffix in SUFFIXES) or path.is_file():
            continue
        wrong = (
            "this is a folder" if path.is_dir() else f"no such file{hint(value) if is_config else hint_of_part(value)}"
        )
        raise InputError(f"{'--config' if is_config else option} {value}: {wrong}")


def _values(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, written with a space or with `=`."""
    for i, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if equals and option.startswith("-"):
            yield option, value
        elif i > 0 and args[i - 1].startswith("-"):
            yield args[i - 1], arg


def _refuse_double_keys(root: yaml.Node | None) -> None:
    """Refuse a repeated key, because the parser would keep only the last one."""
    waiting, seen = [root] if root is not None else [], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode) or id(node) in seen:
            continue
        seen.add(id(node))
        names = set()
        for item in node.value:
            key, value = item if isinstance(item, tuple) else (None, item)
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    twice = f"the key {key.value} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, twice, key.start_mark)
                names.add(key.value)
            waiting.append(value)
