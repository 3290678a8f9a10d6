"""Tables of results in CSV files. A table is written completely or not at all, and the next run reads it."""

import csv
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path

from lit_knn.common.errors import InputError
from lit_knn.common.files import locked, written_whole

# Names of the files in a run's folder.
FIDELITY_CSV = "fidelity.csv"
AVERAGES_PREFIX = "averages_"  # `averages_<metric>.csv` lists the measured averages in a folder
# `checkpoints_<metric>.csv` lists the measured checkpoints of a run
CHECKPOINTS_PREFIX = "checkpoints_"
# `draws_<metric>.csv` lists further draws of samples of the best checkpoint
DRAWS_PREFIX = "draws_"
# Names of metrics for people; other metrics are shown by their names in logs.
TITLES = {
    "fid": "FID",
    "fd_pixels": "Fréchet distance on pixels",
    "inception_score": "Inception Score",
}
HELD_OUT = "_held_out"  # suffix of metrics that compare with held-out images
# Advice in the message about a table that was measured with other settings.
SAME_SETTINGS = "measure with the same settings, or rename that file"

Row = dict[str, str | int | float]
"""The cells of a row of a table of results, by column; a number that is not known is ""."""


def number(row: Mapping[str, str | int | float], column: str) -> float:
    """Return the number in a cell of this column; NaN if the cell is empty."""
    cell = row[column]
    return math.nan if isinstance(cell, str) else cell


def keep_aside(path: Path, reason: str) -> None:
    """Rename a damaged file, and warn with its new name."""
    number = 1
    aside = path.with_name(f"{path.name}.damaged-{number}")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")

    path.replace(aside)
    warnings.warn(
        f"{path} is damaged ({reason}): kept as {aside}, and what it had is measured again",
        stacklevel=2,
    )


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a CSV file completely or not at all.

    It has a column for every key of any row, in order of appearance.
    """
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))

    with written_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def as_texts(row: Mapping[str, str | float], number_format: str) -> dict[str, str]:
    """Return the cells of a row as texts, its floats in a format; NaN, a number that cannot be told, becomes ""."""
    texts = {}
    for name, value in row.items():
        if isinstance(value, Real) and not isinstance(value, Integral):
            texts[name] = "" if math.isnan(value) else format(value, number_format)
        else:
            texts[name] = str(value)
    return texts


def text_table(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """Return these columns of rows of texts as a table for a terminal."""
    columns = []
    for name in names:
        cells = [name, *(row[name] for row in rows)]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) for cell in cells])

    return "\n".join(map("  ".join, zip(*columns, strict=True)))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a file that `write_rows` wrote."""
    # A spreadsheet puts a mark before UTF-8.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        rows = list(reader)

    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            problem = "has not the fields of the header; the file is damaged"
            raise InputError(f"{path}: line {number} {problem}")
    return rows


def undamaged_rows(path: Path) -> list[dict[str, str]]:
    """Read a file that `write_rows` wrote, or return no rows if it is missing or damaged.

    A damaged file is renamed, with a warning.
    """
    if not path.exists():
        return []
    try:
        return read_rows(path)
    # InputError and UnicodeDecodeError are ValueErrors.
    except (ValueError, csv.Error) as error:
        keep_aside(path, str(error))
        return []


class ResultsTable:
    """A CSV file of results. It need not exist, and several processes may add rows.

    Args:
        path: the file.
        columns: the type of each column, by name.
        key: names of the columns that identify a row.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Mapping[str, type],
        key: tuple[str, ...],
    ) -> None:
        self.path = Path(path)
        self.columns = dict(columns)
        self.key = key

    def load(self) -> list[Row]:
        """Load the finished rows, on one rank.

        A damaged file is renamed with a warning. A file with other columns is refused.
        """
        texts = undamaged_rows(self.path)
        other_columns = set(texts[0]) ^ set(self.columns) if texts else set()
        if other_columns:
            names = ", ".join(sorted(other_columns))
            raise InputError(f"{self.path} has other columns ({names}): {SAME_SETTINGS}")
        try:
            return [self._with_types(row) for row in texts]
        except ValueError as error:
            keep_aside(self.path, str(error))
            return []

    def _with_types(self, texts: Mapping[str, str]) -> Row:
        """Convert the texts of a row to the types of their columns."""
        return {name: kind(texts[name]) for name, kind in self.columns.items()}

    def append(self, row: Row) -> None:
        """Add a finished row, unless the table already has this key; only one rank may call this."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            rows = self.load()
            if self.find(rows, **row) is None:
                rows.append({name: row[name] for name in self.columns})
                write_rows(self.path, rows)

    def find(self, rows: list[Row], **key: str | int | float) -> Row | None:
        """Return the row with this key, or None."""
        for row in rows:
            if all(row[name] == key[name] for name in self.key):
                return row
        return None
