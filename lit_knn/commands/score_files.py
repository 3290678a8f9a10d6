"""The files of `lit-knn score`: the table, and pictures of the likest pairs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torchvision.utils import save_image

from lit_knn.common.errors import InputError, printable
from lit_knn.common.files import locked, make_folder, written_whole
from lit_knn.common.pixels import are_pictures
from lit_knn.common.tables import Row, as_texts, text_table, undamaged_rows, write_rows
from lit_knn.figures.image_grid import pair_grid

# Rows with equal cells here are measurements of the same value; a new one replaces an old one.
KEY = ("samples", "metric", "reference", "features")
SHOWN = (
    "samples",
    "metric",
    "value",
    "standard_error",
    "features",
    "images",
    "reference",
    "pixels",
)
OPTIONS = "options"


def table_path(output: Path) -> Path:
    """Return the path of the table, in `output` if that is a folder; the folder is made.

    Raises InputError if another file has this path, before long work.
    """
    path = output.expanduser()
    if path.suffix != ".csv":
        path = path / "scores.csv"
    make_folder(path.parent)
    if path.is_dir():
        raise InputError(f"--output {path} is a folder, and no table")

    for row in undamaged_rows(path):
        if not row.keys() >= set(KEY):
            names = ", ".join(map(printable, row))
            rule = f"is no table of scores: its columns are {names}"
            raise InputError(f"--output {path} {rule}; give another path")
    return path


def picture_path(table: Path, samples: str) -> Path:
    """Return the path of the picture of some samples, beside the table, named after both."""
    name = re.sub(r"[^\w.-]+", "_", samples).strip("_")
    return table.with_name(f"{table.stem}_{name}_nearest.png")


def keep_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a table, in place of rows of the same values."""
    new = []
    new_keys = set()
    for row in rows:
        texts = as_texts(row, ".8g")
        new.append(texts)
        new_keys.add(_key(texts))

    # Another process may add its rows to the same table.
    with locked(path):
        old = [row for row in undamaged_rows(path) if _key(row) not in new_keys]
        write_rows(path, old + new)


def shown_table(rows: Sequence[Row]) -> str:
    """Return the rows as a table for a terminal."""
    texts = [as_texts(row, ".4g") for row in rows]
    has_options = any(row[OPTIONS] for row in texts)
    return text_table(texts, (*SHOWN, OPTIONS) if has_options else SHOWN)


def save_pairs(path: Path, samples: Tensor, images: Tensor) -> None:
    """Draw rows of samples, (n, C, H, W), each above their nearest images; the likest pairs come first."""
    if len(samples) and are_pictures(tuple(samples.shape[1:])):
        with written_whole(path) as partial:
            save_image(pair_grid(samples, images), partial)


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return what tells whether two rows are measurements of the same value."""
    # Tables of earlier versions have no column of options.
    return tuple(row.get(name, "") for name in (*KEY, OPTIONS))
