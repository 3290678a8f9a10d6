"""Finds the class or the option that a user probably meant by a name that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from types import ModuleType

from lit_knn.commands.cli.packaged_configs import FILES, hint_of_part, names

# Names that users give to the number of samples
NUMBERS_OF_SAMPLES = ("images", "num_images", "num_samples", "n_samples")


def nearest_class(name: str) -> str:
    """Return a question to add to the message that a class is unknown: the nearest class or config, or "" for none."""
    from pytorch_lightning import loggers  # They take seconds to import.
    from torch import optim

    from lit_knn import callbacks, data, estimators, index, modules, nets

    classes = {}
    for room in (loggers, optim, callbacks, data, estimators, index, modules, nets):
        for public_name in room.__all__:
            classes[public_name.lower()] = public_name

    near = get_close_matches(Path(name).stem.lower(), classes, n=1)
    if near and "/" not in name:
        return f"; did you mean {classes[near[0]]}?"
    return hint_of_part(name)


def hint_of_argument(argument: str, options: Iterable[str]) -> str:
    """Return words to add to the message that an argument is unknown: what the user probably meant, or "".

    Args:
        argument: the first unknown argument, such as `--lr`.
        options: the names of the command's options, such as `trainer.max_steps`.
    """
    if argument.startswith("-"):
        name = argument.lstrip("-").partition("=")[0]
        meant = options_like(name, list(options))
        if name in NUMBERS_OF_SAMPLES:
            meant = [option for option in meant if option != "samples"]
            meant += ["samples", "data.predict_samples (of predict)"]
        choices = " or ".join(f"--{option}" for option in meant)
        return f"; did you mean {choices}?" if choices else ""

    if argument in names() or Path(argument).suffix in FILES:
        return f"; each config needs an option of its own: -c {argument}"
    return ""


def options_like(name: str, options: list[str]) -> list[str]:
    """Return the options that a user probably meant by an unknown one, from the best rule that finds any.

    Args:
        name: the unknown option, without dashes.
        options: the names of the command's options. Those of model and data are not among them.
    """
    # 1. The name is right, but the part before it is missing: `lr` for `model.lr`.
    in_parts = [option for option in options if option.endswith(f".{name}")]
    in_parts += _in_classes(name)
    if in_parts and name != "seed":  # Seeds of parts are refused: --seed_everything sets all.
        return in_parts

    # 2. The part is misspelt: `trainr.max_steps`.
    part, dot, after_part = name.partition(".")
    parts = {option.partition(".")[0] for option in options}
    if dot and part not in parts:
        return [f"{near}.{after_part}" for near in get_close_matches(part, parts, n=1)]

    # 3. The name is only a piece of longer ones: `trainer.steps` for `trainer.max_steps`. The two nearest are named.
    beginning, _, word = name.rpartition(".")
    longer = [option for option in options if option.startswith(beginning) and word in option]
    if longer:
        return sorted(get_close_matches(name, longer, n=2, cutoff=0))

    # 4. The name is misspelt in another way.
    return get_close_matches(name, options, n=1)


def _in_classes(name: str) -> list[str]:
    """Return the options of model, estimator and data with this name, if a class of the project has one."""
    from lit_knn import data, estimators, modules

    rooms = {"model": modules, "model.estimator": estimators, "data": data}
    return [f"{part}.{name}" for part, room in rooms.items() if _has_option(room, name)]


def _has_option(room: ModuleType, name: str) -> bool:
    """Return whether a class of a package has an option of this name."""
    for public_name in room.__all__:
        public: object = getattr(room, public_name)
        if isinstance(public, type) and name in signature(public).parameters:
            return True
    return False
