"""Tables of results in CSV files: written whole or not at all, and read again by the next run."""

import csv
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError

# What a run leaves in its folder.
FIDELITY_CSV = "fidelity.csv"
TRAINING_TIME_JSON = "training_time.json"
CHECKPOINTS_PREFIX = "checkpoints_"
"""The measured checkpoints of a run are in `checkpoints_<metric>.csv`."""
TITLES = {"fid": "FID", "fd_pixels": "Fréchet distance on pixels", "inception_score": "Inception Score"}
"""Metrics as people read them; others are shown as they are logged."""

Row = dict[str, str | int | float]


def keep_aside(path: Path, reason: str) -> None:
    """Rename a damaged file, with a warning that says to what."""
    names = (path.with_name(f"{path.stem}.damaged-{n}{path.suffix}") for n in range(1, 10_000))
    aside = next(name for name in names if not name.exists())
    path.replace(aside)
    warnings.warn(f"{path} is damaged ({reason}): kept as {aside}, and what it had is measured again", stacklevel=2)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file at once or not at all; its columns are those of all rows, in the order they come up."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with written_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read what `write_rows` wrote.

    Raises:
        InputError: a row has more or fewer fields than the header, as in a file that was cut off.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise InputError(f"{path}: line {number} has not the fields of the header; the file is damaged")
    return rows


class ResultsTable:
    """Rows in a CSV file, known by some of their columns. Each new row rewrites the file, at once or not at all.

    Args:
        path: the file; need not exist.
        columns: name and type of each column.
        key: the columns a row is known by.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Mapping[str, type], key: tuple[str, ...]) -> None:
        self.path = Path(path)
        self.columns = dict(columns)
        self.key = key

    def load(self) -> list[Row]:
        """The finished rows.

        A file that is not a table of these columns is renamed, with a warning that names it, and the table starts anew.
        Call it on one rank alone.

        Raises:
            InputError: the file cannot be read.
        """
        if not self.path.exists():
            return []
        try:
            rows = read_rows(self.path)
            if rows and list(rows[0]) != list(self.columns):
                raise ValueError("it has other columns")
            return [{name: kind(row[name]) for name, kind in self.columns.items()} for row in rows]
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error
        except (ValueError, csv.Error) as error:  # InputError and UnicodeDecodeError are ValueErrors
            keep_aside(self.path, str(error))
            return []

    def append(self, row: Row) -> None:
        """Add a finished row to those in the file. Call it on one rank alone."""
        write_rows(self.path, [*self.load(), {name: row[name] for name in self.columns}])

    def find(self, rows: list[Row], **key: str | int | float) -> Row | None:
        """The last of `rows` with this key, or None."""
        found = [row for row in rows if all(row[name] == key[name] for name in self.key)]
        return found[-1] if found else None
