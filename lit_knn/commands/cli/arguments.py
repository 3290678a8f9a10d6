"""Rewrites the arguments before parsing, and the parser's result."""

from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace

from lit_knn.common.errors import InputError

# Under this key the parser notes the file of a group of options. The key is not an option.
FILE_NOTE = "__path__"


def as_dict(value: Any) -> Any:
    """Turn the parser's namespaces into dictionaries, also those in lists, without its notes of the files read."""
    if isinstance(value, (Namespace, dict)):
        inner = vars(value) if isinstance(value, Namespace) else value
        return {name: as_dict(part) for name, part in inner.items() if name != FILE_NOTE}
    return [as_dict(part) for part in value] if isinstance(value, (list, tuple)) else value


def check_linked(args: Sequence[str]) -> None:
    """Refuse a seed for one part, because the common seed would silently replace it."""
    for arg in args:
        option = arg.partition("=")[0].replace(".init_args", "")
        if option in ("--model.seed", "--data.seed"):
            raise InputError(f"{option} is set by --seed_everything: give that option")
