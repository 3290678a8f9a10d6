"""Completes the arguments before they are parsed, and turns the parser's result into plain dictionaries."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lit_knn.commands.next_run import names_model
from lit_knn.common.errors import InputError
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.names import PARTS_OF_A_RUN, Options

# Under this key, which is no option, the parser notes the file that a group of options was read from.
FILE_NOTE = "__path__"
# The config.yaml of a training has these options. The commands take them from a file, and make no use of them.
LEFT_OUT = {
    "plan": ("weights_only",),
    "probe": ("weights_only", "ckpt_path"),
    "best": ("weights_only", "ckpt_path"),
}


def as_dict(options: Namespace | Options) -> dict[str, Any]:
    """Return options as plain dictionaries, with the parser's namespaces replaced and its notes of files left out."""
    by_name = vars(options) if isinstance(options, Namespace) else options
    plain = {}
    for name, value in by_name.items():
        if name != FILE_NOTE:
            plain[name] = _plain(value)
    return plain


def _plain(value: object) -> object:
    """Return the value of an option with the parser's namespaces replaced by dictionaries, also in lists."""
    if isinstance(value, (Namespace, dict)):
        return as_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def check_linked(args: Sequence[str]) -> None:
    """Raise InputError for a seed of model or data alone, because `--seed_everything` would silently replace it."""
    for arg in args:
        option = arg.partition("=")[0].replace(".init_args", "")
        if option in ("--model.seed", "--data.seed"):
            raise InputError(f"{option} is set by --seed_everything: give that option")


def check_left_out(args: Sequence[str]) -> None:
    """Raise InputError for an option on the command line that the command takes from a file alone; see `LEFT_OUT`."""
    names = LEFT_OUT.get(args[0], ()) if args else ()
    for arg in args:
        name = arg.partition("=")[0].removeprefix("--")
        if name in names:
            raise InputError(f"{args[0]} has no option --{name}")


def completed(args: Sequence[str]) -> list[str]:
    """Return a command line with what it leaves out: for `best` the run's config, and for a bare `probe` a model."""
    command, options = args[:1], list(args[1:])
    if command == ["best"]:
        return ["best", *_config_of_run(options), *options]
    if command == ["probe"] and not names_model(options):
        return ["probe", "--model", "LitEstimator", *options]
    return list(args)


def _config_of_run(options: Sequence[str]) -> list[str]:
    """Return `-c` and the configuration, as YAML, of the run that `--run` names; nothing without `--run`."""
    run = _value_of("--run", options)
    if run is None:
        return []

    config = RunFolder(Path(run)).config()
    parts = {name: value for name, value in config.items() if name in PARTS_OF_A_RUN}
    return ["-c", yaml.safe_dump(parts)]


def _value_of(option: str, options: Sequence[str]) -> str | None:
    """Return the value of an option, given as `--NAME VALUE` or `--NAME=VALUE`; the last one counts, None is none."""
    value = None
    for place, argument in enumerate(options):
        name, equals, after = argument.partition("=")
        if name == option and equals:
            value = after
        elif name == option and place + 1 < len(options):
            value = options[place + 1]
    return value
