"""Class labels and names of classes: from folders, from arrays, and from whatever the images come with."""

import numpy as np
from numpy.typing import ArrayLike

from lit_knn.common.errors import InputError, prefixed, printable
from lit_knn.data.file_names import is_hidden
from lit_knn.data.files import Files, ImageLabels, say
from lit_knn.data.label_file import LABEL_FILE, LARGEST, composed, listed_labels


def image_labels(files: Files, from_folders: bool, used: bool = False) -> ImageLabels:
    """Return the labels of `files.images`.

    `dataset.json` at the root, if any, has one label for each image: {"labels": [["a/0.png", 6],
    ...]}, or {"labels": null}. With `from_folders` it is not read. The folders are then numbered in
    the order of their names, from 0, as torchvision's `ImageFolder` does, and each image must lie
    directly in the folder of its class.

    Args:
        files: of a folder or zip.
        from_folders: label each image by its folder.
        used: whether labels are needed. Otherwise a `dataset.json` without class labels, such as
            one with camera poses, is left out, and a line says so.
    """
    if from_folders:
        return _folder_labels(files)
    if files.labels is not None:
        return _known_labels(files, files.labels, used)

    try:
        labels = listed_labels(files)
    except InputError as error:
        if used:
            raise
        say(f"{error}; it is left out, and the images have no labels")
        return ImageLabels(problem=str(error))

    if used and labels is None:
        advice = files.label_advice or f"list them in {LABEL_FILE}, or set labels_from_folders"
        raise InputError(f"{files.path} has no labels: {advice}")
    return ImageLabels(labels)


def _known_labels(files: Files, labels: ImageLabels, used: bool) -> ImageLabels:
    """Return the labels that come with the images, such as a column of a table, if they are classes."""
    if labels.numbers is None:
        if used:
            why = labels.problem or files.label_advice
            raise InputError(f"{files.path} has no labels: {why}")
        if labels.problem:
            say(f"{files.path}: {labels.problem}; the images have no labels")
        return labels

    with prefixed(str(files.path)):
        numbers = usable_labels(labels.numbers, len(files.images), used, str(files.path))
    return ImageLabels(numbers, labels.class_names)


def class_numbers(labels: np.ndarray, N: int) -> np.ndarray:
    """Return labels (N,) as int64; raise InputError unless all are integers from 0 to `LARGEST`."""
    if labels.shape != (N,) or labels.dtype.kind not in "iub":
        what = f"{labels.dtype} of shape {labels.shape}"
        raise InputError(f"labels must be {N} integers, got {what}{_advice_for_shape(labels, N)}")

    wrong = labels[(labels < 0) | (labels > LARGEST)]
    if wrong.size:
        raise InputError(f"labels must be from 0 to {LARGEST}, got {wrong[0]}")
    return labels.astype(np.int64)


def _advice_for_shape(labels: np.ndarray, N: int) -> str:
    """Return the end of a message: how to turn labels in another layout into integers (N,)."""
    if labels.ndim != 2 or len(labels) != N:
        return ""

    # With a single column, argmax would make all classes 0.
    if labels.shape[1] == 1:
        return "; give labels[:, 0]"
    return "; for one-hot labels give labels.argmax(1)"


def usable_labels(labels: ArrayLike | None, N: int, used: bool, name: str) -> np.ndarray | None:
    """Return the labels of a data module as class numbers, (N,) int64.

    Args:
        labels: what the data module has loaded; None for none.
        N: number of images.
        used: refuse labels that are not class numbers. If false, such labels give None, and a line
            says that they are left out.
        name: that of the data, for the line.
    """
    if labels is None:
        return None

    try:
        return class_numbers(np.asarray(labels), N)
    except InputError as error:
        if used:
            raise
        say(f"{name}: {error}; the labels are left out")
        return None


def _folder_labels(files: Files) -> ImageLabels:
    """Label each image by the number of its folder; refuse folders that cannot be classes."""
    where = f"{files.path}: labels from folders"

    # Folders such as `train` and `test` above the classes would become the classes.
    misplaced = next((name for name in files.images if name.count("/") != 1), None)
    if misplaced is not None:
        place = f"{misplaced.count('/')} folders deep" if "/" in misplaced else "in none"
        rule = "need each image directly in the folder of its class"
        advice = _advice_for_one_folder(files)
        raise InputError(f"{where} {rule}; {printable(misplaced)} is {place}{advice}")

    folder_of = [name.partition("/")[0] for name in files.images]
    classes, labels = np.unique(folder_of, return_inverse=True)
    _check_all_have_images(files, where, set(classes))
    if len(classes) == 1:
        raise InputError(f"{where} need several folders, there is only {printable(classes[0])}")

    # No option could choose between two classes of one name.
    names = [composed(name) for name in classes.tolist()]
    twice = sorted(name for name in set(names) if names.count(name) > 1)
    if twice:
        raise InputError(f"{where}: two folders have the name {printable(twice[0])}")
    return ImageLabels(labels.astype(np.int64), names)


def _advice_for_one_folder(files: Files) -> str:
    """Return the end of a message for classes that all lie in one more folder, as in a zip of a folder; else ""."""
    outer = {name.partition("/")[0] for name in files.images}
    if len(outer) > 1 or any(name.count("/") != 2 for name in files.images):
        return ""
    return f": give the folder {printable(outer.pop())}, or a zip of what is in it"


def _check_all_have_images(files: Files, where: str, classes: set[str]) -> None:
    """Refuse folders without images that are read, because they would be empty classes."""
    inside = (name for name in files.names if "/" in name and not is_hidden(name))
    folders = {name.partition("/")[0] for name in inside}
    empty = sorted(folders - classes)
    if empty:
        raise InputError(f"{where}: the folder {printable(empty[0])} holds no image that is read")
