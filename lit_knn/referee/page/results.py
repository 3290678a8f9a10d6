"""Read tables of results, and group their rows by case and entry."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from lit_knn.common.errors import InputError
from lit_knn.referee.table import MACHINE, NUMBERS, read_table

Row = dict[str, str]
CASE = ("case", "data", "N", "d")
MACHINE_AND_THREADS = (*MACHINE, "threads")
# Rows of a case that agree in these columns are of one entry.
ENTRY = ("name", "settings", "origin", *MACHINE_AND_THREADS, "batch")


@dataclass
class Entry:
    """Holds the rows of one estimator on one machine.

    Attributes:
        facts: its latest row; use only columns that are the same at all noise levels.
        rows: the row of each noise level.
    """

    facts: Row
    rows: dict[float, Row] = field(default_factory=dict)

    def value(self, t: float, column: str) -> float:
        """Return a number at noise level t; NaN if it was not measured."""
        return float(self.rows.get(t, {}).get(column) or "nan")

    def values(self, column: str) -> list[float]:
        """Return the numbers of a column at the noise levels where it was measured."""
        return [value for t in self.rows if not math.isnan(value := self.value(t, column))]

    def mean(self, column: str) -> float:
        """Return the mean of a column over the noise levels where it was measured; NaN if there is none."""
        return fmean(self.values(column) or [math.nan])

    @property
    def name(self) -> str:
        """Name for readers."""
        return self.facts["name"]

    @property
    def machine(self) -> tuple[str, ...]:
        """Processor, cores, memory and threads."""
        return tuple(self.facts[column] for column in MACHINE_AND_THREADS)


@dataclass
class Results:
    """Holds all entries that were measured on one case with the same data.

    Attributes:
        facts: one of the rows. Read only the columns of `CASE`, which are equal in all rows.
        entries: in order of appearance.
        older: the number of rows that a later measurement of the same entry replaces.
    """

    facts: Row
    entries: list[Entry]
    older: int

    @property
    def case(self) -> str:
        """Name of the case."""
        return self.facts["case"]

    @property
    def levels(self) -> list[float]:
        """All noise levels, ascending."""
        return sorted({t for entry in self.entries for t in entry.rows})

    @property
    def machines(self) -> list[tuple[str, ...]]:
        """All machines, in order of appearance."""
        return list(dict.fromkeys(entry.machine for entry in self.entries))

    def letter(self, machine: tuple[str, ...]) -> str:
        """Name a machine on the page: A, B, and so on, and by numbers after Z."""
        place = self.machines.index(machine)
        return chr(ord("A") + place) if place < 26 else str(place + 1)

    def distinct(self, column: str) -> list[str]:
        """Return the values of a column in all rows, without repetitions and empty ones."""
        found = (row[column] for entry in self.entries for row in entry.rows.values())
        return [value for value in dict.fromkeys(found) if value]


def read_results(paths: Sequence[Path]) -> list[Results]:
    """Read tables of results; return the results of each case, in order of appearance.

    Where an entry was measured at the same noise level more than once, the row of the latest date counts.

    Raises:
        InputError: a file has no rows, lacks a column, has another protocol, or a value that is no number.
        OSError: a file cannot be read.
    """
    cases: dict[tuple[str, ...], list[Row]] = {}
    for path in paths:
        rows = read_table(path)
        if not rows:
            raise InputError(f"{path} does not exist or has no results")
        for line, row in enumerate(rows, start=2):
            _check_numbers(row, f"{path}: line {line}")
            cases.setdefault(tuple(row[name] for name in CASE), []).append(row)
    return [_grouped(rows) for rows in cases.values()]


def _grouped(rows: list[Row]) -> Results:
    keys = [tuple(row[name] for name in ENTRY) for row in rows]
    entries = {key: Entry(row) for key, row in zip(keys, rows, strict=True)}
    older = 0
    # ISO dates sort as text, and the sort keeps the order of equal ones.
    for key, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[1]["date"]):
        entry, t = entries[key], float(row["t"])
        older += t in entry.rows
        entry.rows[t] = entry.facts = row
    return Results(rows[0], list(entries.values()), older)


def _check_numbers(row: Row, place: str) -> None:
    for name in NUMBERS:
        try:
            value = float(row[name] or "nan")
        except ValueError as error:
            raise InputError(f"{place}: {name} is {row[name]!r}, which is no number") from error
        if name == "t" and not 0 < value < math.inf:
            raise InputError(f"{place}: t is {row[name]!r}, not a positive number")
