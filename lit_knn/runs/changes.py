"""Compares the options of two runs, and names those that differ."""

import filecmp
from collections.abc import Mapping
from pathlib import Path

from lit_knn.runs.harmless import watches
from lit_knn.runs.names import Options, flattened

# Lightning knows these precisions by two names.
PRECISIONS = {None: "32-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
# These options of a data module set how its images are used. The other options set which images there are.
OPTIONS_OF_USE = (
    "batch_size",
    "index",
    "sharded",
    "seed",
    "val_images",
    "predict_samples",
    "encode_batch",
    "num_workers",
    "pin_memory",
    "cache_dir",
)
# These options choose some of the images; a command that does not train is free to choose others.
OPTIONS_OF_CHOICE = ("hflip", "held_out", "train_images")

# The number of options that a message names.
MOST_NAMED = 3

Changes = dict[str, tuple[object, object]]
"""The old and the new value of each changed option, by its name on the command line."""


def changes(before: Options, now: Options) -> Changes:
    """Return the options in which two configurations differ.

    Two paths count as equal if their files hold the same bytes.

    Args:
        before: the configuration of a run, as its config.yaml has it.
        now: the configuration to compare with it.
    """
    old = dict(flattened(_simplified(before)))
    new = dict(flattened(_simplified(now)))

    different = {}
    for name in old | new:
        value_before, value_now = old.get(name), new.get(name)
        if not _same(name, value_before, value_now):
            different[name] = value_before, value_now
    return different


def data_changes(before: Options, now: Options, trains: bool) -> Changes:
    """Return the options in which two configurations describe other data.

    Args:
        before: the configuration of a run, as its config.yaml has it.
        now: the configuration to compare with it.
        trains: the data are for a training, so the choice of images counts, too.
    """
    ignored = set(OPTIONS_OF_USE)
    if not trains:
        ignored.update(OPTIONS_OF_CHOICE)
    different = changes({"data": before.get("data")}, {"data": now.get("data")})

    of_data = {}
    for name, pair in different.items():
        # With null the data module chooses the value, perhaps the same one, so null is no difference.
        if None not in pair and ignored.isdisjoint(name.split(".")):
            of_data[name] = pair
    return of_data


def described(different: Changes) -> str:
    """Return one line on the options that differ, such as `--model.lr 0.003, now 0.1`.

    Args:
        different: the options. Three of them are named; of more options, only the number is given.
    """
    phrases = []
    for name, (old, new) in different.items():
        phrases.append(f"--{name} {old}, now {new}")

    more = len(phrases) - MOST_NAMED
    if more > 0:
        phrases = phrases[:MOST_NAMED]
        phrases.append(f"and {more} more")
    return "; ".join(phrases)


def _simplified(options: Options) -> Options:
    """Return options without callbacks that only watch, and with one spelling of values that have several."""
    trainer = dict(options.get("trainer") or {})
    callbacks = trainer.get("callbacks") or []
    if isinstance(callbacks, Mapping):
        callbacks = [callbacks]
    compared = [callback for callback in callbacks if not watches(callback)]
    trainer["callbacks"] = dict(enumerate(compared))

    precision = trainer.get("precision")
    name_of_precision = None if precision is None else str(precision)
    trainer["precision"] = PRECISIONS.get(name_of_precision, precision)

    # Only the number of ranks counts, and not how they are spread over machines.
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes")
    if type(devices) is int and type(nodes) is int:
        trainer["devices"], trainer["num_nodes"] = devices * nodes, 1
    return {**options, "trainer": trainer}


def _same(name: str, before: object, now: object) -> bool:
    """Return whether two values of an option mean the same."""
    if before == now:
        return True
    if not isinstance(before, str) or not isinstance(now, str):
        return False
    old, new = Path(before).expanduser(), Path(now).expanduser()
    if not new.exists():
        return False

    # Data may have moved. That is no difference, because other images are refused by their hash in the checkpoint.
    if not old.exists():
        return name.startswith("data.")
    return _same_bytes(old, new)


def _same_bytes(one: Path, other: Path) -> bool:
    """Return whether two files hold the same bytes, or two folders files of the same names and sizes."""
    if one.samefile(other):
        return True
    if one.is_dir() and other.is_dir():
        return _sizes(one) == _sizes(other)
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _sizes(folder: Path) -> dict[Path, int]:
    """Return the sizes of the files in a folder and its subfolders, by their paths in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.stat().st_size for path in files}
