"""Tables of results in CSV files. A table is written completely or not at all, and the next run reads it."""

import csv
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
# Advice beside a table that was measured in another way.
SAME_SETTINGS = "measure with the same settings, or rename that file"

Row = dict[str, str | int | float]


def keep_aside(path: Path, reason: str) -> None:
    """Rename a damaged file, and warn with its new name."""
    names = (path.with_name(f"{path.name}.damaged-{n}") for n in range(1, 10_000))
    aside = next(name for name in names if not name.exists())
    path.replace(aside)
    warnings.warn(
        f"{path} is damaged ({reason}): kept as {aside}, and what it had is measured again",
        stacklevel=2,
    )


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file completely or not at all. It has a column for every key of any row, in order of appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with written_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def text_table(rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str]) -> str:
    """Format rows as a text table; `formats` gives the columns and the number format of each."""
    lines = [
        [*formats],
        *([format(row[name], spec) for name, spec in formats.items()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a file that `write_rows` wrote."""
    # A spreadsheet puts a mark before UTF-8.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise InputError(
                f"{path}: line {number} has not the fields of the header; the file is damaged"
            )
    return rows


def undamaged_rows(path: Path) -> list[dict[str, str]]:
    """Read a file that `write_rows` wrote. Return no rows if it is missing or damaged; rename it if it is damaged."""
    try:
        return read_rows(path) if path.exists() else []
    except InputError as error:
        keep_aside(path, str(error))
        return []


class ResultsTable:
    """A CSV file of `columns`; those of `key` identify a row. It need not exist, and several processes may add rows."""

    def __init__(
        self, path: str | os.PathLike[str], columns: Mapping[str, type], key: tuple[str, ...]
    ) -> None:
        self.path = Path(path)
        self.columns = dict(columns)
        self.key = key

    def load(self) -> list[Row]:
        """Load the finished rows, on one rank. A damaged file is renamed with a warning; other columns are refused."""
        if not self.path.exists():
            return []
        try:
            rows = read_rows(self.path)
            other = set(rows[0]) ^ set(self.columns) if rows else ()
            if not other:
                return [
                    {name: kind(row[name]) for name, kind in self.columns.items()} for row in rows
                ]
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error
        except (
            ValueError,
            csv.Error,
        ) as error:  # InputError and UnicodeDecodeError are ValueErrors.
            keep_aside(self.path, str(error))
            return []
        raise InputError(
            f"{self.path} has other columns ({', '.join(sorted(other))}): {SAME_SETTINGS}"
        )

    def append(self, row: Row) -> None:
        """Add a finished row, unless the table already has this key; only one rank may call this."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            rows = self.load()
            if self.find(rows, **row) is None:
                write_rows(self.path, [*rows, {name: row[name] for name in self.columns}])

    def find(self, rows: list[Row], **key: str | int | float) -> Row | None:
        """Return the row with this key, or None."""
        return next((row for row in rows if all(row[name] == key[name] for name in self.key)), None)
