"""Reads YAML strictly: a repeated key is an error, and errors name the file and the line."""

from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from lit_knn.commands.cli.packaged_configs import with_packaged_parts
from lit_knn.common.errors import InputError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_load_yaml = jsonargparse.get_loader("yaml")


def load(text: str, path: str | None = None) -> Any:
    """Load a file or a value like the parser's own loader, but refuse a repeated key.

    `None` also means null, because the parser turns null into `None` inside nested options. `path` is the file after
    `-c`; without it, the parser adds another file's name to a `YAMLError`, or takes a value that is no YAML as text.
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
