"""Data sets of the library `datasets`: folders of `save_to_disk`, parquet files, and names on the Hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_knn.common.errors import InputError, reading
from lit_knn.data.files import Files, ImageLabels

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features

# Before a name on the Hub, such as hf://ylecun/mnist.
HUB = "hf://"
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")
SAVED, SAVED_SPLITS, PARQUET = "state.json", "dataset_dict.json", ".parquet"
LABEL_ADVICE = "name the column of the labels with label_key"


def is_data_set(path: str) -> bool:
    """Return whether a path is one of the Hub, a parquet file, or a folder that has some or was saved to disk."""
    if path.startswith(HUB) or path.lower().endswith(PARQUET):
        return True

    folder = Path(path).expanduser()
    saved = (folder / SAVED).is_file() or (folder / SAVED_SPLITS).is_file()
    return saved or any(folder.glob(f"*{PARQUET}"))


def data_set_files(path: str, label_key: str | None = None) -> Files:
    """List the images of a data set by their rows, with its labels.

    Args:
        path: see `is_data_set`.
        label_key: the column that has the labels; None for the one that looks like it.
    """
    import datasets

    with reading(path, " as a data set"):
        data = open_data_set(path)
    column = image_column(data.features, path)
    labels = labels_of(data, path, label_key)
    images = data.select_columns(column).cast_column(column, datasets.Image(decode=False))
    names = [f"row {i}" for i in range(len(data))]

    def read(name: str) -> bytes:
        cell = images[int(name.removeprefix("row "))][column]
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
    """
    import datasets

    if path.startswith(HUB):
        return datasets.load_dataset(path.removeprefix(HUB), split="train")

    folder = Path(path).expanduser()
    if (folder / SAVED).is_file():
        return datasets.Dataset.load_from_disk(str(folder))
    if (folder / SAVED_SPLITS).is_file():
        return _one_split(path, datasets.DatasetDict.load_from_disk(str(folder)))

    files = sorted(folder.glob(f"*{PARQUET}")) if folder.is_dir() else [folder]
    names = [str(file) for file in files]
    return datasets.load_dataset("parquet", data_files={"train": names}, split="train")


def image_column(features: "Features", path: str) -> str:
    """Return the name of the only column of images; raise InputError if there is none, or several."""
    import datasets

    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    # Files of other programs have the bytes alone, or {"bytes": …, "path": …}.
    for name, kind in features.items():
        is_bytes = isinstance(kind, datasets.Value) and kind.dtype in ("binary", "large_binary")
        is_image_dict = isinstance(kind, dict) and "bytes" in kind
        if not images and (is_bytes or is_image_dict):
            images.append(name)

    if len(images) != 1:
        number = "no column of images" if not images else f"several, {', '.join(images)}"
        advice = (
            "keep one of them" if images else "a column has datasets.Image or the bytes of files"
        )
        raise InputError(f"{path} has the columns {', '.join(features)}, and {number}: {advice}")
    return images[0]


def labels_of(data: "Dataset", path: str, column: str | None = None) -> ImageLabels:
    """Return the class labels, and the names of the classes of a `ClassLabel`.

    Without `column` they are the only column of `ClassLabel`, or else one of integers with a usual name.
    """
    import datasets

    if column is None:
        features = data.features.items()
        columns = [name for name, kind in features if isinstance(kind, datasets.ClassLabel)]
        if len(columns) != 1:
            usual = [name for name in LABEL_COLUMNS if name in data.features]
            columns = [name for name in usual if "int" in getattr(data.features[name], "dtype", "")]
        if not columns:
            return ImageLabels()
        column = columns[0]

    if column not in data.features:
        known = ", ".join(data.features)
        raise InputError(f"{path} has no column {column}; it has {known}")

    numbers = np.asarray(data.with_format("numpy")[column][:])
    return ImageLabels(numbers, getattr(data.features[column], "names", None))


def _one_split(path: str, splits: "DatasetDict") -> "Dataset":
    """Return the split `train`, or the only one."""
    names: Sequence[str] = list(splits)
    if "train" in names:
        return splits["train"]
    if len(names) == 1:
        return splits[names[0]]
    raise InputError(f"{path} has the splits {', '.join(names)}: give the folder of one")
