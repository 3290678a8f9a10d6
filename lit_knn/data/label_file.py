"""The labels that `dataset.json` lists, the file of EDM's image folders and zips."""

import json
import unicodedata
from collections.abc import Sequence

import numpy as np

from lit_knn.common.errors import InputError, printable, reading
from lit_knn.data.files import Files, with_slashes

LABEL_FILE = "dataset.json"
LARGEST = 2**31 - 1  # the largest number that a class may have


def composed(name: str) -> str:
    """Return the form of a name that keyboards type: macOS stores é as e and an accent."""
    return unicodedata.normalize("NFC", name)


def listed_labels(files: Files) -> np.ndarray | None:
    """Return the labels that `dataset.json` lists; None if there is no such file, or its labels are null."""
    if LABEL_FILE not in files.names:
        elsewhere = [name for name in files.names if name.endswith(f"/{LABEL_FILE}")]
        if elsewhere:
            place = printable(elsewhere[0])
            raise InputError(f"{files.path}: {LABEL_FILE} must be at the root, found {place}")
        return None

    where = f"{files.path}: {LABEL_FILE}"
    with reading(where, advice='; it must be {"labels": [[file name, integer], ...]}'):
        content = json.loads(files.read(LABEL_FILE))
        if "labels" not in content:
            raise ValueError("it has no key labels")

        listed = content["labels"]
        if listed is None:
            return None
        label_of = _label_by_name(where, listed)
    return _in_order(where, label_of, files)


def _label_by_name(where: str, listed: Sequence[object]) -> dict[str, int]:
    """Check the entries of `dataset.json`, and return the label of each name."""
    label_of: dict[str, int] = {}
    for entry in listed:
        match entry:
            # In Python, True is an integer.
            case [str(listed_name), int(label)] if type(label) is int and 0 <= label <= LARGEST:
                name = with_slashes(listed_name)
                if name not in label_of:
                    label_of[name] = label
                    continue
        # Only an entry that was not taken above comes here.
        rule = "must list each image once, as [file name, integer from 0]"
        raise InputError(f"{where} {rule}, but has {entry!r:.80}")
    return label_of


def _in_order(where: str, label_of: dict[str, int], files: Files) -> np.ndarray:
    """Return the labels in the order of the images. Listed names may have another Unicode form than the files'."""
    label_of_form = {composed(name): label for name, label in label_of.items()}

    labels = np.empty(len(files.images), np.int64)
    for i, name in enumerate(files.images):
        label = label_of.get(name, label_of_form.get(composed(name)))
        if label is None:
            count = f"{len(label_of)} labels for {len(files.images)} images"
            raise InputError(f"{where} has {count}; it lacks {printable(name)}")
        labels[i] = label

    # A copy of a folder may have ended before its last images.
    unknown = sorted(label_of_form.keys() - {composed(name) for name in files.names})
    if unknown:
        problem = f"{len(label_of)} labels for {len(files.images)} images"
        raise InputError(
            f"{where} has {problem}; it names {printable(unknown[0])}, which is no file"
        )
    return labels
