"""Data sets of the library `datasets`: folders of `save_to_disk`, parquet files, and names on the Hub."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lit_knn.common.errors import InputError, reading
from lit_knn.data.files import Files, ImageLabels, say

if TYPE_CHECKING:
    from datasets import Dataset, Features

T = TypeVar("T")

# Before a name on the Hub, such as hf://ylecun/mnist.
HUB = "hf://"
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")
SAVED, SAVED_SPLITS, PARQUET = "state.json", "dataset_dict.json", ".parquet"
# Types of texts.
TEXTS = ("string", "large_string")
# Words in the names of parquet files that tell their split.
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
LABEL_ADVICE = "name the column of the labels with label_key"


def is_data_set(path: str) -> bool:
    """Return whether a path is one of the Hub, a parquet file, or a folder that has some or was saved to disk."""
    if path.startswith(HUB) or path.lower().endswith(PARQUET):
        return True

    folder = Path(path).expanduser()
    saved = (folder / SAVED).is_file() or (folder / SAVED_SPLITS).is_file()
    return saved or bool(_parquet_files(folder))


def data_set_files(path: str, label_key: str | None = None) -> Files:
    """List the images of a data set by their rows, with its labels.

    Args:
        path: see `is_data_set`.
        label_key: the column that has the labels; None for the one that looks like it.
    """
    import datasets

    with reading(path, " as a data set"):
        # A saved data set may ask for tensors in place of Python's values.
        data = open_data_set(path).with_format(None)
    column = image_column(data.features, path)
    labels = labels_of(data, path, label_key)
    with reading(f"{path}: the column {column}", " as images"):
        images = data.select_columns(column).cast_column(column, datasets.Image(decode=False))
    names = [f"row {i}" for i in range(len(data))]

    def read(name: str) -> bytes:
        cell = images[int(name.removeprefix("row "))][column]
        if cell is None or (cell["bytes"] is None and cell["path"] is None):
            raise ValueError("it has no image")

        # A data set may have the images beside it.
        return Path(cell["path"]).read_bytes() if cell["bytes"] is None else cell["bytes"]

    stamp = _stamp(Path(path).expanduser())
    return Files(Path(path), names, names, read, lambda name: stamp, labels, LABEL_ADVICE)


def _stamp(path: Path) -> tuple[int, int]:
    """Return the bytes of the files of a data set, and their last change; zeros for one of the Hub."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    status = [file.stat() for file in files if file.is_file()]
    if not status:
        return 0, 0
    return sum(one.st_size for one in status), max(one.st_mtime_ns for one in status)


def open_data_set(path: str) -> "Dataset":
    """Open a data set, mapped from its files. Parquet files are copied into the cache of `datasets` once.

    Args:
        path: see `is_data_set`; or `hf://` and a name on the Hub, whose split `train` is downloaded.

    Raises InputError if it holds no rows.
    """
    import datasets
    import pyarrow.parquet

    if path.startswith(HUB):
        return datasets.load_dataset(path.removeprefix(HUB), split="train")

    folder = Path(path).expanduser()
    if (folder / SAVED).is_file() or (folder / SAVED_SPLITS).is_file():
        saved = datasets.load_from_disk(str(folder))
        return _chosen_split(path, saved) if isinstance(saved, datasets.DatasetDict) else saved

    files = _chosen_split(path, _parquet_splits(folder)) if folder.is_dir() else [folder]
    # `datasets` cannot read files without rows.
    names = [str(file) for file in files if pyarrow.parquet.read_metadata(file).num_rows]
    if not names:
        raise InputError(f"{path} holds no rows")
    return datasets.load_dataset("parquet", data_files={"train": names}, split="train")


def image_column(features: "Features", path: str) -> str:
    """Return the name of the only column of images; raise InputError if there is none, or several."""
    import datasets

    # Files of other programs have {"bytes": …, "path": …}, or the bytes alone. Other bytes may lie beside images.
    images, dicts, contents = [], [], []
    for name, kind in features.items():
        if isinstance(kind, datasets.Image):
            images.append(name)
        elif isinstance(kind, dict) and "bytes" in kind:
            dicts.append(name)
        elif isinstance(kind, datasets.Value) and kind.dtype in ("binary", "large_binary"):
            contents.append(name)

    images = images or dicts or contents
    if len(images) != 1:
        number = "no column of images" if not images else f"several, {', '.join(images)}"
        advice = (
            "keep one of them" if images else "a column has datasets.Image or the bytes of files"
        )
        raise InputError(f"{path} has the columns {', '.join(features)}, and {number}: {advice}")
    return images[0]


def labels_of(data: "Dataset", path: str, column: str | None = None) -> ImageLabels:
    """Return the class labels, and the names of the classes of a `ClassLabel`.

    Without `column` they are the only column of `ClassLabel`, or else one of integers with a usual name. In a `column`
    of texts each text is a class; they are numbered in their order, as `Dataset.class_encode_column` does.
    """
    import datasets

    if column is None:
        features = data.features.items()
        classes = [name for name, kind in features if isinstance(kind, datasets.ClassLabel)]
        usual = [name for name in LABEL_COLUMNS if name in data.features]
        columns = classes
        if len(classes) != 1:
            columns = [name for name in usual if "int" in _type_of(data, name)]
        if not columns:
            return ImageLabels(problem=_why_not_labels(data, usual[0]) if usual else "")
        column = columns[0]
        others = [name for name in dict.fromkeys([*classes, *usual]) if name != column]
        if others:
            names = " nor ".join(others)
            say(
                f"{path}: labels are sought in the column {column}, not in {names}; label_key chooses"
            )

    if column not in data.features:
        known = ", ".join(data.features)
        raise InputError(f"{path} has no column {column}; it has {known}")

    values = data[column][:]
    missing = values.count(None)
    if missing:
        problem = f"the column {column} has no label in {missing:,} of {len(values):,} rows"
        return ImageLabels(problem=problem)

    if _type_of(data, column) in TEXTS:
        texts, numbers = np.unique(values, return_inverse=True)
        return ImageLabels(numbers.astype(np.int64), texts.tolist())

    with reading(f"{path}: the column {column}", " as labels"):
        return ImageLabels(np.asarray(values), getattr(data.features[column], "names", None))


def _type_of(data: "Dataset", column: str) -> str:
    """Return the name of the type of a column's values; "" for nested ones."""
    return str(getattr(data.features[column], "dtype", ""))


def _why_not_labels(data: "Dataset", column: str) -> str:
    """Say why a column with a usual name of labels is left out, and what to do."""
    kind = _type_of(data, column)
    if kind in TEXTS:
        return f"the column {column} has texts, which label_key={column} would make classes"
    values = kind or "lists or structures"
    return f"the column {column} has {values} and no integers; {LABEL_ADVICE}"


def _parquet_files(folder: Path) -> list[Path]:
    """Return the parquet files in a folder and below it, in the order of their names. A file is no folder."""
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() == PARQUET)


def _parquet_splits(folder: Path) -> dict[str, list[Path]]:
    """Return the parquet files of each split, by a word in their paths; those without such a word are of "none"."""
    files_of: dict[str, list[Path]] = {}
    for file in _parquet_files(folder):
        words = re.split("[^a-z]+", str(file.relative_to(folder)).lower())
        split = next((word for word in words if word in SPLITS), "none")
        files_of.setdefault(split, []).append(file)
    return files_of


def _chosen_split(path: str, splits: Mapping[str, T]) -> T:
    """Return the split `train`, or the only one; a line tells of others."""
    names = list(splits)
    if len(names) == 1:
        return splits[names[0]]
    if "train" not in names:
        raise InputError(f"{path} has the splits {', '.join(names)}: give the files of one")

    others = ", ".join(name for name in names if name != "train")
    say(f"{path}: the split train is read, not {others}")
    return splits["train"]
