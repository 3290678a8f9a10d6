"""Compares the options of two runs, and names those that differ."""

import filecmp
from collections.abc import Iterator, Mapping
from pathlib import Path

from lit_knn.runs.harmless import watches
from lit_knn.runs.names import Options

# Lightning's other names of a precision.
PRECISIONS = {None: "32-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
# These options of a data module set how its images are used. The other options set what they are.
USES = (
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
CHOICES = ("hflip", "held_out", "train_images")

# The places of functions and classes in earlier versions, which configurations of runs may still name.
MOVED = {
    "lit_knn.sampling.schedules.PseudoHuber": "lit_knn.sampling.distances.PseudoHuber",
    "lit_knn.sampling.schedules.euclidean": "lit_knn.sampling.distances.euclidean",
}

# An option's name on the command line, with its two values.
Changes = dict[str, tuple[object, object]]


def changes(before: Options, now: Options) -> Changes:
    """Return the options in which two configurations differ.

    A path to the same bytes is the same value.

    Args:
        before: the configuration of a run, as its config.yaml has it.
        now: another one.
    """
    old = dict(_pairs(_simplified(before)))
    new = dict(_pairs(_simplified(now)))

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
        now: another one.
        trains: the data are for a training, so the choice of images counts, too.
    """
    ignored = set(USES)
    if not trains:
        ignored.update(CHOICES)
    different = changes({"data": before.get("data")}, {"data": now.get("data")})

    of_data = {}
    for name, pair in different.items():
        # null is the data module's own choice.
        if None not in pair and ignored.isdisjoint(name.split(".")):
            of_data[name] = pair
    return of_data


def described(different: Changes, limit: int = 3) -> str:
    """Say in one line which options differ: `--model.lr 0.003, now 0.1`."""
    words = []
    for name, (old, new) in different.items():
        words.append(f"--{name} {old}, now {new}")

    more = len(words) - limit
    if more > 0:
        words = words[:limit]
        words.append(f"and {more} more")
    return "; ".join(words)


def _simplified(options: Options) -> Options:
    """Leave out callbacks that only watch, and bring values with several names to one."""
    trainer = dict(options.get("trainer") or {})
    callbacks = trainer.get("callbacks") or []
    if isinstance(callbacks, Mapping):
        callbacks = [callbacks]
    training = [callback for callback in callbacks if not watches(callback)]
    trainer["callbacks"] = dict(enumerate(training))

    precision = trainer.get("precision")
    trainer["precision"] = PRECISIONS.get(precision and str(precision), precision)

    # The same number of ranks may be spread over machines in another way.
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes")
    if type(devices) is int and type(nodes) is int:
        trainer["devices"], trainer["num_nodes"] = devices * nodes, 1
    return {**options, "trainer": trainer}


def _pairs(options: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield name and value of each option in a nested configuration, as on the command line.

    `model.net` is the class of the net, and `model.net.channels` one of its options.

    Args:
        options: the configuration, or one value in it.
        name: its name.
    """
    if isinstance(options, list) and any(isinstance(part, Mapping) for part in options):
        options = dict(enumerate(options))
    if not isinstance(options, Mapping):
        yield name, options
        return

    if "class_path" in options:
        yield name, options["class_path"]
        options = options.get("init_args") or {}

    for part, value in options.items():
        full_name = f"{name}.{part}" if name else str(part)
        yield from _pairs(value, full_name)


def _same(name: str, before: object, now: object) -> bool:
    """Tell whether two values of an option mean the same."""
    if before == now:
        return True
    if not isinstance(before, str) or not isinstance(now, str):
        return False
    if MOVED.get(before, before) == MOVED.get(now, now):
        return True

    old, new = Path(before).expanduser(), Path(now).expanduser()
    if not new.exists():
        return False

    # Data that have moved: the checkpoint has a hash of the images, and other ones are refused.
    if not old.exists():
        return name.startswith("data.")
    return _same_bytes(old, new)


def _same_bytes(one: Path, other: Path) -> bool:
    """Tell whether two files hold the same bytes; of folders, names and sizes must do."""
    if one.samefile(other):
        return True
    if one.is_dir() and other.is_dir():
        return _sizes(one) == _sizes(other)
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _sizes(folder: Path) -> dict[Path, int]:
    """Return the sizes of the files in a folder and below it, by their paths in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.stat().st_size for path in files}
