"""Checks of the YAML files of a command line, which name the file and the line of a mistake.

The parser itself keeps the last of two equal keys, drops unknown keys of empty mappings, and names no file.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_knn.commands.cli.packaged_configs import CONFIG_OPTIONS, hint, hint_of_part
from lit_knn.common.errors import InputError, first_line

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SUFFIXES = (".yaml", ".yml")
# Aliases can make a small file stand for a huge configuration.
MOST_NODES = 100_000
# These mappings may be empty: a class may take no arguments.
MAY_BE_EMPTY = ("init_args", "dict_kwargs")
Keys = tuple[str, ...]


class EmptyMapping:
    """An empty mapping in a config file: the keys that lead to it, and where it stands."""

    def __init__(self, keys: Keys, place: str) -> None:
        self.keys = keys
        self.place = place


def check_config_files(args: Sequence[str]) -> list[EmptyMapping]:
    """Read every YAML file that the arguments name, and the files that those name.

    Returns:
        The empty mappings of the files after `-c` and `--config`, for `check_empty_mappings`.

    Raises:
        InputError: a file is not text or not YAML, has a key twice, or refers to itself.
    """
    found: list[EmptyMapping] = []
    for option, value in _values(args):
        is_config = option in CONFIG_OPTIONS
        if is_config and not any(mark in value for mark in ("{", ": ", ":\n")):
            found += _empty_mappings(_check_config(Path(value)), value, ())
        elif Path(value).suffix in SUFFIXES:
            if not Path(value).is_file():
                raise InputError(f"{option} {value}: no such file{hint_of_part(value)}")
            _check_file(Path(value), ())
        elif value.startswith(("{", "[")):
            _check_text(value, option)
    return found


def check_empty_mappings(empty: Sequence[EmptyMapping], *configs: Mapping[str, Any]) -> None:
    """Refuse an empty mapping whose key is in none of the parsed configurations, because the parser drops it."""
    for mapping in empty:
        if not any(_has(config, mapping.keys) for config in configs):
            raise InputError(f"{mapping.place}: there is no option {'.'.join(mapping.keys)}")


def _values(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, written with a space or with `=`."""
    for i, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if equals and option.startswith("-"):
            yield option, value
        elif i > 0 and args[i - 1].startswith("-"):
            yield args[i - 1], arg


def _check_config(path: Path) -> yaml.Node:
    """Check a file after `-c`, whose value may also be YAML itself."""
    if not path.is_file():
        wrong = "this is a folder" if path.is_dir() else f"no such file{hint(str(path))}"
        raise InputError(f"--config {path}: {wrong}")
    root = _check_file(path, ())
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"{path} holds no options: it must have lines like `trainer:`")
    return root


def _check_file(path: Path, parents: tuple[Path, ...]) -> yaml.Node | None:
    try:
        if not path.is_file():
            return None  # The parser says that it is missing, or the value is no path.
        resolved = path.resolve()
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file in UTF-8, as YAML must be") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if resolved in parents:
        raise InputError(f"{path} refers to itself")
    root = _check_text(text, str(path))
    for name in () if root is None else _file_names(root):
        _check_file(path.parent / name, (*parents, resolved))
    return root


def _check_text(text: str, place: str) -> yaml.Node | None:
    """Check a YAML text, and return its nodes."""
    try:
        root = yaml.compose(text, Loader=LOADER)
        if root is not None:
            _count_nodes(root, place, {}, set())
            yaml.load(text, Loader=LOADER)  # This makes the values, and refuses unknown tags.
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise InputError(f"{place}{line}: {error.problem or error.context}: this is not YAML") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{place}: {first_line(error)}: this is not YAML") from error
    return root


def _count_nodes(node: yaml.Node, place: str, known: dict[int, int], above: set[int]) -> int:
    """Return the number of nodes with all aliases written out. Refuse a key that is there twice, and a cycle."""
    here = f"{place}, line {node.start_mark.line + 1}"
    if id(node) in above:
        raise InputError(f"{here}: this mapping holds itself")
    if id(node) not in known:
        total = 1
        for child in _children(node, here):
            total += _count_nodes(child, place, known, above | {id(node)})
        if total > MOST_NODES:
            raise InputError(f"{here}: aliases make this more than {MOST_NODES} values")
        known[id(node)] = total
    return known[id(node)]


def _children(node: yaml.Node, here: str) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                place = here.rpartition(", line ")[0]
                raise InputError(f"{place}, line {key.start_mark.line + 1}: the key {key.value} is there twice")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
            yield key
            yield value


def _file_names(root: yaml.Node) -> Iterator[str]:
    """Yield the texts that end like names of YAML files."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            if node.value.endswith(SUFFIXES):
                yield node.value
        elif id(node) not in seen:
            seen.add(id(node))
            waiting += [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]


def _empty_mappings(node: yaml.Node, place: str, keys: Keys) -> Iterator[EmptyMapping]:
    """Yield the empty mappings outside lists. The parser replaces lists as a whole."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = str(key.value).removesuffix("+")
        if isinstance(value, yaml.MappingNode) and not value.value:
            if name not in MAY_BE_EMPTY:
                yield EmptyMapping((*keys, name), f"{place}, line {key.start_mark.line + 1}")
        else:
            yield from _empty_mappings(value, place, (*keys, name))


def _has(config: Any, keys: Keys) -> bool:
    for key in keys:
        if not isinstance(config, Mapping) or key not in config:
            return False
        config = config[key]
    return True
