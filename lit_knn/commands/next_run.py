"""The command of the training that follows a probe."""

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lit_knn.common.pixels import are_pictures
from lit_knn.modules import LitEstimator

# Options of `probe` alone; a test compares them with its signature.
PROBE_OPTIONS = ("levels", "latents", "held_out", "by_class", "t_min", "t_max", "out")
CONFIG = ("-c", "--config")
# This run trains any images, if the command names their channels. Of larger ones it would take long
# to compare all pixels.
SMALL_RUN, LARGEST_SIDE = "table2/digits", 32
# This run takes its channels from the data, and compares features of pictures of any size.
PICTURE_RUN = "photos/edm"
# Configs of the estimators that a probe can name.
PARTS = {
    "OneSample": "estimators/one_sample.yaml",
    "STF": "estimators/stf.yaml",
    "KNN": "estimators/knn.yaml",
    "SubspaceKNN": "estimators/subspace_knn.yaml",
    "Exact": "estimators/exact.yaml",
}


def command_of_next_run(
    trainer: Any,
    model: Any,
    shape: Sequence[int],
    settings: Path,
    estimator: str | None,
) -> str:
    """Return a line with the command that trains with what a probe found.

    Args:
        trainer: its `command_line` is that of the probe.
        model: the module that was probed.
        shape: shape of an image.
        settings: path of probe.yaml.
        estimator: the estimator to train with; None for the config's own.
    """
    options = without(trainer.command_line[1:], PROBE_OPTIONS)
    has_config = any(re.match(r"-c|--config|--model\b", option) for option in options)
    small = len(shape) == 3 and max(shape[1:]) <= LARGEST_SIDE
    has_run = small or are_pictures(tuple(shape))

    if isinstance(model, LitEstimator) and (has_config or not has_run):
        return f"Next, with the config of a training: lit-knn fit -c CONFIG -c {settings}"
    if not has_config and small:
        options = ["-c", SMALL_RUN, *options, "--model.net.in_channels", str(shape[0])]
    elif not has_config:
        options = ["-c", PICTURE_RUN, *options]

    place = after_last_config(options)
    options[place:place] = ["-c", str(settings)]
    if estimator is not None:
        options += ["--model.estimator", PARTS[estimator]]
    return f"Next: {shlex.join(['lit-knn', 'fit', *options])}"


def without(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Return arguments without these options, which are `--NAME VALUE` or `--NAME=VALUE`."""
    remaining = []
    skips_value = False
    for arg in args:
        option, equals, _ = arg.partition("=")
        is_left_out = option.startswith("--") and option[2:] in names
        if not skips_value and not is_left_out:
            remaining.append(arg)
        skips_value = is_left_out and not equals
    return remaining


def after_last_config(args: Sequence[str]) -> int:
    """Return the place after the last config; 0 if there is none."""
    place = 0
    for number, arg in enumerate(args):
        option, equals, _ = arg.partition("=")
        if option in CONFIG:
            place = number + (1 if equals else 2)
    return place
