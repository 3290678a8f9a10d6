"""Makes a network of a user's class for `lit-knn export`, from its class path or from the run's config.yaml."""

import os
import sys
from pathlib import Path

import yaml
from torch import nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.runs.folder import CONFIG_NAME, RunFolder
from lit_knn.runs.names import Options, option_of

HINT = "give --net, the class path of the network, such as mine.Net"


def import_from_current_folder() -> None:
    """Let users name classes in files of the current folder. It comes first, so that no package hides a file."""
    if sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, os.getcwd())


def network_of_run(run: Path, text: str | None = None) -> nn.Module:
    """Return the network of a run with new weights; this runs the user's code from the current folder.

    Args:
        run: the folder of the run; its config.yaml has the options of the network.
        text: class path of the network, or YAML with `class_path` and `init_args`; None for the
            network that config.yaml names. If it is only a class path, and config.yaml names the same
            class, the network gets its options from config.yaml.

    Raises:
        InputError: there is no such class, its constructor fails, or nothing names a network.
    """
    stored = _stored(run)
    if text is None:
        if stored is None:
            raise InputError(f"{run} has no {CONFIG_NAME} that names its network: {HINT}")
        return _made(stored, f"{run / CONFIG_NAME}: model.net")

    try:
        spec = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"--net {text!r:.80}: {first_line(error)}") from error

    if isinstance(spec, str):
        is_stored = stored is not None and stored.get("class_path") == spec
        spec = stored if is_stored else {"class_path": spec}

    return _made(spec, "--net")


def _stored(run: Path) -> Options | None:
    """Return class path and options of the network from the configuration of a run, or None if it names no network."""
    if not (run / CONFIG_NAME).is_file():
        return None

    net: Options | None = option_of(RunFolder(run).config()["model"], "net")
    return net


def _made(spec: object, owner: str) -> nn.Module:
    """Return the network of a class path and its options.

    Args:
        spec: `class_path` and `init_args`.
        owner: where they are from, for messages.
    """
    # This import takes a second, and an export of a network of lit_knn does not need it.
    from lit_knn.commands.cli.one_object import make_object

    try:
        return make_object(nn.Module, "net", spec)
    except InputError as error:
        reason = str(error).removeprefix("--net: ")
        raise InputError(f"{owner}: {reason}") from error
