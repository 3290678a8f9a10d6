"""Finds the options that an unknown argument of the command line may stand for."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from types import ModuleType

import pytorch_lightning as pl

from lit_knn import data, estimators, modules
from lit_knn.callbacks import LastCheckpoint, SampleWriter
from lit_knn.commands.cli.packaged_configs import FILES, names

UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
# The first parts of options, and the options without parts.
GROUPS = (
    "model",
    "data",
    "trainer",
    "optimizer",
    "lr_scheduler",
    "last_checkpoint",
    "sample_writer",
)
OF_A_COMMAND = ("config", "seed_everything", "ckpt_path", "print_config", "samples", *GROUPS)
# Every run has these callbacks. Their options begin with these names.
OF_EVERY_RUN = {"last_checkpoint": LastCheckpoint, "sample_writer": SampleWriter}


def hint_of_unknown(message: str) -> str:
    """Return what to add to the message that an argument is unknown: what may be meant.

    Args:
        message: the parser's, such as `unrecognized arguments: --lr 0.1`.
    """
    unknown = UNKNOWN.match(message)
    if not unknown:
        return ""

    argument = unknown[1]
    if not argument.startswith("-"):
        if argument in names() or Path(argument).suffix in FILES:
            return f"; each config needs an option of its own: -c {argument}"
        return ""

    group, _, option = argument.lstrip("-").partition(".")
    meant = _in_group(group, option) if option else _alone(group)
    if not meant:
        return ""
    choices = " or ".join(f"--{name}" for name in meant)
    return f"; did you mean {choices}?"


def _in_group(group: str, option: str) -> list[str]:
    """Return what `--GROUP.OPTION` may stand for. The parser knows those of model and data."""
    kinds = {"trainer": pl.Trainer, **OF_EVERY_RUN}
    if group in kinds:
        near = _near(option, signature(kinds[group]).parameters)
        return [f"{group}.{name}" for name in near]

    return [f"{near}.{option}" for near in get_close_matches(group, GROUPS, n=1)]


def _alone(name: str) -> list[str]:
    """Return what `--NAME` may stand for: an option of a part, or one that is spelled nearly so."""
    of_trainer = signature(pl.Trainer).parameters
    if name in of_trainer:
        return [f"trainer.{name}"]

    of_parts = []
    for part, room in {"model": modules, "model.estimator": estimators, "data": data}.items():
        if _has_option(room, name):
            of_parts.append(f"{part}.{name}")
    if of_parts and name != "seed":  # One option sets the seeds of all parts.
        return of_parts

    begun = [option for option in OF_A_COMMAND if option.startswith(name)]
    if begun:
        return begun
    near = get_close_matches(name, OF_A_COMMAND, n=1)
    if near:
        return near
    return [f"trainer.{option}" for option in _near(name, of_trainer)]


def _has_option(room: ModuleType, name: str) -> bool:
    """Return whether a class of a package has an option of this name."""
    for public_name in room.__all__:
        public: object = getattr(room, public_name)
        if isinstance(public, type) and name in signature(public).parameters:
            return True
    return False


def _near(name: str, options: Iterable[str]) -> list[str]:
    """Return the options that contain a name, at most two, or else the one most like it."""
    options = list(options)
    longer = [option for option in options if name in option]
    near = get_close_matches(name, longer, n=2)
    if near:
        return sorted(near)
    return get_close_matches(name, options, n=1)
