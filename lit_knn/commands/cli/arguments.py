"""Rewrites the arguments before parsing, and the parser's result."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jsonargparse import Namespace

from lit_knn.common.errors import InputError

# Under this key the parser notes the file of a group of options. The key is not an option.
FILE_NOTE = "__path__"
ESTIMATOR_OPTION = re.compile(r"--[\w.]+\.estimator")


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


def kept_options(
    args: Sequence[str], options: Mapping[str, Any], parse: Callable[[Sequence[str]], Mapping[str, Any]]
) -> Iterator[str]:
    """Find the options that an estimator on the command line inherits from one of another class in a config.

    The parser keeps options of the same name, even if they mean something else. `options` is the parsed command line.
    """
    for i, arg in enumerate(args):
        option, equals, name = arg.partition("=")
        name = name if equals else "".join(args[i + 1 : i + 2])
        if not ESTIMATOR_OPTION.fullmatch(option) or not all(part.isidentifier() for part in name.split(".")):
            continue
        with suppress(Exception):  # Without an estimator in a config, no class was replaced.
            others = [*args[:i], *args[i + (1 if equals else 2) :]]
            own_options = [j for j, other in enumerate(others) if other.startswith(f"{option}.")]
            gone = {*own_options, *(j + 1 for j in own_options if "=" not in others[j])}
            before = _class_at(parse([other for j, other in enumerate(others) if j not in gone]), option)
            now = _class_at(options, option)
            own = {other.partition("=")[0] for other in args}
            kept = {
                name: value
                for name, value in now["init_args"].items()
                if name in before["init_args"] and value is not None and f"{option}.{name}" not in own
            }
            if kept and now["class_path"] != before["class_path"]:
                old = before["class_path"].rpartition(".")[2]
                told = ", ".join(f"{name}={value}" for name, value in kept.items())
                own_option = f"{option}.{next(iter(kept))} …"
                yield f"{option} {name} takes over {told} of the config's {old}; for other values give {own_option}"


def _class_at(config: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the class and the arguments of an option such as `--model.estimator` in a parsed configuration."""
    for key in option.removeprefix("--").split("."):
        config = config["init_args"][key] if "init_args" in config else config[key]
    return {"init_args": {}, **config}
