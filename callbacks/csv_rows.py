"""Tables on disk that are never half-written."""

import csv
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_knn.errors import InputError


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write a CSV file at once or not at all; its columns are those of all rows, in the order they come up."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(file.name, path)


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
