"""Makes the command of the training that is to follow a probe."""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

import pytorch_lightning as pl

from lit_knn.commands.cli.packaged_configs import CONFIG_OPTIONS
from lit_knn.common.pixels import are_pictures
from lit_knn.modules import LitEstimator

# Options of `probe` alone; a test compares them with its signature.
PROBE_OPTIONS = ("levels", "latents", "held_out", "by_class", "t_min", "t_max", "out")
# The config of a run that measures the distance of all pixels, which would take long with sides above the largest one.
# It trains images of any number of channels, which must be given.
SMALL_RUN, LARGEST_SIDE = "table2/digits", 32
# The config of a run that measures the distance of features, for pictures of any size. It takes its network's options
# from the data.
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
    command_line: Sequence[str],
    model: pl.LightningModule,
    shape: Sequence[int],
    settings: Path,
    estimator: str | None,
    num_classes: int = 0,
) -> str:
    """Return a line with the command of a training that uses what a probe found.

    Args:
        command_line: the arguments of the probe.
        model: the module that was probed.
        shape: shape of an image.
        settings: path of probe.yaml.
        estimator: class of the estimator to train with; None for the one that the config has.
        num_classes: number of classes if the training is to be class-conditional, and the command line does not say
            so; otherwise 0.
    """
    options = without(command_line[1:], PROBE_OPTIONS)
    conditional = []
    if num_classes:
        conditional = ["--model.class_conditional", "true"]
        conditional += ["--model.net.num_classes", str(num_classes)]
    has_config = names_model(options)
    run = run_for(shape)

    # A probe without a config, or with one of `LitEstimator`, probes an estimator that no training belongs to.
    if isinstance(model, LitEstimator) and (has_config or run is None):
        command = shlex.join(["lit-knn", "fit", "-c", "CONFIG", "-c", str(settings), *conditional])
        return f"Next, with the config of a training: {command}"
    # Without a config, the training starts from a packaged one that fits the images.
    if not has_config and run is not None:
        options = ["-c", run, *options]
        if run == SMALL_RUN:
            options += ["--model.net.in_channels", str(shape[0])]

    place = after_last_config(options)
    options[place:place] = ["-c", str(settings)]
    if estimator is not None:
        options += ["--model.estimator", PARTS[estimator]]
    options += conditional
    return f"Next: {shlex.join(['lit-knn', 'fit', *options])}"


def run_for(shape: Sequence[int]) -> str | None:
    """Return the config of a run that trains images of this shape, or None if there is none."""
    if len(shape) != 3:
        return None

    is_small = max(shape[1:]) <= LARGEST_SIDE
    if are_pictures(tuple(shape)) and (shape[0] == 3 or not is_small):
        return PICTURE_RUN
    return SMALL_RUN if is_small else None


def names_model(options: Sequence[str]) -> bool:
    """Return whether a command line has options of a model, or a config, which has them."""
    for option in options:
        name = option.partition("=")[0]
        if name in CONFIG_OPTIONS or name.partition(".")[0] == "--model":
            return True
    return False


def without(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without some options, given as `--NAME VALUE` or `--NAME=VALUE`.

    Args:
        args: the command line.
        names: names of the options to leave out, without dashes.
    """
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
    """Return the index of the argument that follows the last config; 0 if there is no config."""
    place = 0
    for number, arg in enumerate(args):
        option, equals, _ = arg.partition("=")
        if option in CONFIG_OPTIONS:
            # `-c=FILE` is one argument, and `-c FILE` is two.
            place = number + (1 if equals else 2)
    return place
