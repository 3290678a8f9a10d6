"""Rewrites the arguments before parsing, and the parser's result."""

import argparse
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lit_knn.commands.cli.packaged_configs import CONFIG_OPTIONS
from lit_knn.common.errors import InputError
from lit_knn.runs.folder import RunFolder

# Under this key the parser notes the file of a group of options. The key is not an option.
FILE_NOTE = "__path__"
# `best` uses these parts of a run's configuration. The other parts say how its training was started.
PARTS_OF_A_RUN = ("seed_everything", "model", "data", "trainer")


def as_dict(value: Any) -> Any:
    """Turn the parser's namespaces into dictionaries, also those in lists, without its notes of the files read."""
    if isinstance(value, (Namespace, dict)):
        inner = vars(value) if isinstance(value, Namespace) else value
        return {name: as_dict(part) for name, part in inner.items() if name != FILE_NOTE}

    if isinstance(value, (list, tuple)):
        return [as_dict(part) for part in value]
    return value


def check_linked(args: Sequence[str]) -> None:
    """Refuse a seed for one part, because the common seed would silently replace it."""
    for arg in args:
        option = arg.partition("=")[0].replace(".init_args", "")
        if option in ("--model.seed", "--data.seed"):
            raise InputError(f"{option} is set by --seed_everything: give that option")


def check_text(args: Sequence[str]) -> None:
    """Refuse a value that is no text, because the settings of a run are a text file."""
    for option, arg in pairwise(["", *args]):
        name = os.fsencode(arg).decode(errors="backslashreplace")
        if name != arg and option not in CONFIG_OPTIONS:
            raise InputError(f"{option} {name}: not UTF-8; rename the file or the folder")


def with_config_of_run(args: Sequence[str]) -> list[str]:
    """Insert the configuration of the run into `best --run RUN …`; a bare `probe` needs no model."""
    command = args[0] if args else ""
    options = list(args[1:])
    has_model = any(re.match(r"-c|--config|--model\b", arg) for arg in args)
    if command == "probe" and not has_model:
        return ["probe", "--model", "LitEstimator", *options]
    if command != "best":
        return list(args)

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run")
    run = parser.parse_known_args(options)[0].run
    if run is None:
        return list(args)

    config = RunFolder(Path(run)).config()
    parts = {name: value for name, value in config.items() if name in PARTS_OF_A_RUN}
    return ["best", "-c", yaml.safe_dump(parts), *options]
