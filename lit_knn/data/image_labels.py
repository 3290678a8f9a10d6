"""Class labels of image files: from `dataset.json`, or from folders as torchvision's `ImageFolder` reads them."""

import json
from typing import Any

import numpy as np

from lit_knn.common.errors import InputError, first_line, printable
from lit_knn.data.files import DAMAGED, Files, is_hidden

LABEL_FILE = "dataset.json"


def image_labels(files: Files, from_folders: bool) -> np.ndarray | None:
    """Return the labels of `files.images`, (N,) int64, or None if there are none.

    Args:
        files: the images, and perhaps `dataset.json` at the root, with exactly one label for each image:
            {"labels": [["00000/img00000.png", 6], ...]} or {"labels": null}.
        from_folders: number the folders in the order of their names, from 0, and label each image by its folder.
            Each image must lie directly in the folder of its class; `dataset.json` is not read.

    Raises:
        InputError: labels that do not match the images, or folders that are no classes.
    """
    return _folder_labels(files) if from_folders else _listed_labels(files)


def _folder_labels(files: Files) -> np.ndarray:
    """Number the folders; refuse those of another level, such as `train` and `test`."""
    where = f"{files.path}: labels from folders"
    odd = next((name for name in files.images if name.count("/") != 1), None)
    if odd is not None:
        place = f"{odd.count('/')} folders deep" if "/" in odd else "in none"
        raise InputError(
            f"{where} need every image directly in the folder of its class, but {printable(odd)} is {place}"
        )
    folders = {name.partition("/")[0] for name in files.names if "/" in name and not is_hidden(name)}
    classes, labels = np.unique([name.partition("/")[0] for name in files.images], return_inverse=True)
    empty = sorted(folders - set(classes))
    if empty:
        raise InputError(f"{where}: the folder {printable(empty[0])} holds no image")
    if len(classes) == 1:
        raise InputError(f"{where} need several folders, there is only {printable(classes[0])}")
    return labels.astype(np.int64)


def _listed_labels(files: Files) -> np.ndarray | None:
    if LABEL_FILE not in files.names:
        elsewhere = [name for name in files.names if name.endswith(f"/{LABEL_FILE}")]
        if elsewhere:
            raise InputError(f"{files.path}: {LABEL_FILE} must be at the root, found {printable(elsewhere[0])}")
        return None
    where = f"{files.path}: {LABEL_FILE}"
    try:
        content = json.loads(files.read(LABEL_FILE))
    except InputError:
        raise
    except DAMAGED as error:
        raise InputError(f"{where} cannot be read: {first_line(error):.300}") from error
    if not isinstance(content, dict) or "labels" not in content:
        raise InputError(f'{where} must be an object with the key "labels"')
    if content["labels"] is None:
        return None
    label_of = _labels_by_name(where, content["labels"])
    images = set(files.images)
    missing = [f"none for {printable(name)}" for name in files.images if name not in label_of]
    unknown = [f"{printable(name)} is not among the images" for name in label_of if name not in images]
    if missing or unknown:
        wrong = (missing + unknown)[0]
        raise InputError(f"{where} has {len(label_of)} labels for {len(images)} images; {wrong}")
    return np.array([label_of[name] for name in files.images], np.int64)


def _labels_by_name(where: str, entries: Any) -> dict[str, int]:
    if not isinstance(entries, list):
        raise InputError(f'{where}: "labels" must be null or a list of [file name, label] pairs')
    label_of: dict[str, int] = {}
    for i, entry in enumerate(entries):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise InputError(f"{where}: entry {i} of labels must be a [file name, label] pair, got {entry!r:.80}")
        name, label = entry
        if type(label) is not int or not 0 <= label < 2**31:
            raise InputError(f"{where}: the label of {printable(name)} must be an integer from 0, got {label!r:.80}")
        if name in label_of:
            raise InputError(f"{where} names {printable(name)} twice")
        label_of[name] = label
    return label_of
