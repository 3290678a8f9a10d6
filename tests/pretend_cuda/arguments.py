"""Walks through the arguments of operations: values in lists. PyTorch's own walk takes several times as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(tree: Any) -> list:
    """All values in a nest of lists, tuples and dicts."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return [tree]
    found = []
    for part in tree:
        if isinstance(part, (list, tuple, dict)):
            found += leaves(part)
        else:
            found.append(part)
    return found


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nest with `function` of each value."""
    if isinstance(tree, dict):
        return {name: mapped(function, part) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([mapped(function, part) for part in tree])
    return function(tree)
