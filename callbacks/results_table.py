"""A table of finished measurements that outlives the run, so that the next run goes on where this one stopped."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from callbacks.results import keep_aside
from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError

Row = dict[str, str | int | float]


class ResultsTable:
    """Rows in a CSV file, known by some of their columns. Each new row rewrites the file, at once or not at all.

    Args:
        path: the file; need not exist.
        columns: name and type of each column; the last must be of 12 characters (a fingerprint), so that a row that
            was cut off shows.
        key: the columns a row is known by.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Mapping[str, type], key: tuple[str, ...]) -> None:
        self.path = Path(path)
        self.columns = dict(columns)
        self.key = key

    def load(self) -> list[Row]:
        """The finished rows.

        A file that is not a whole table of these columns is renamed, with a warning that names it, and the table
        starts anew. Call it on one rank alone.

        Raises:
            InputError: the file cannot be read.
        """
        if not self.path.exists():
            return []
        try:
            text = self.path.read_text(encoding="utf-8")
            return self._parse(text)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # UnicodeDecodeError is one
            keep_aside(self.path, str(error))
            return []

    def append(self, row: Row) -> None:
        """Add a finished row to those in the file. Call it on one rank alone."""
        rows = [*self.load(), row]
        with written_whole(self.path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.columns), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def find(self, rows: list[Row], **key: str | int | float) -> Row | None:
        """The last of `rows` with this key, or None."""
        found = [row for row in rows if all(row[name] == key[name] for name in self.key)]
        return found[-1] if found else None

    def _parse(self, text: str) -> list[Row]:
        lines = list(csv.reader(text.splitlines()))
        if not lines or lines[0] != list(self.columns):
            raise ValueError("it has other columns")
        if not text.endswith("\n"):
            raise ValueError("its last line is cut off")
        rows = []
        for number, cells in enumerate(lines[1:], start=2):
            if len(cells) != len(self.columns) or len(cells[-1]) != 12:
                raise ValueError(f"line {number} is not whole")
            rows.append({name: kind(cell) for (name, kind), cell in zip(self.columns.items(), cells, strict=True)})
        return rows
