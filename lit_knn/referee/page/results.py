"""Read tables of results, and group their rows by case and entry."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from lit_knn.common.errors import InputError
from lit_knn.referee.table import MACHINE, read_table

Row = dict[str, str]
CASE = ("case", "data", "N", "d")
MACHINE_AND_THREADS = (*MACHINE, "threads")
# Rows of a case that agree in these columns are of one entry.
ENTRY = ("name", "settings", "origin", *MACHINE_AND_THREADS, "latents", "repeats", "batch")


@dataclass
class Entry:
    """Holds the rows of one estimator on one machine."""

    facts: Row  # its latest row; use only columns that are the same at all noise levels
    rows: dict[float, Row] = field(default_factory=dict)  # by noise level

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
        return self.facts["name"]

    @property
    def machine(self) -> tuple[str, ...]:
        """Processor, cores, memory and threads."""
        return tuple(self.facts[column] for column in MACHINE_AND_THREADS)


@dataclass
class Results:
    """Holds all entries that were measured on one case with the same data."""

    facts: Row  # one of the rows; read only the columns of `CASE`, which are equal in all rows
    entries: list[Entry]  # in order of appearance

    @property
    def case(self) -> str:
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
        """Name a machine on the page: A, B, and so on."""
        return chr(ord("A") + self.machines.index(machine))

    def distinct(self, column: str) -> list[str]:
        """Return the values of a column in all rows, without repetitions and empty ones."""
        found = (row[column] for entry in self.entries for row in entry.rows.values())
        return [value for value in dict.fromkeys(found) if value]


def read_results(paths: Sequence[Path]) -> list[Results]:
    """Read tables of results; return the results of each case, in order of appearance.

    Where an entry was measured at the same noise level more than once, the row of the latest date counts.
    """
    cases: dict[tuple[str, ...], list[Row]] = {}
    for path in paths:
        rows = read_table(path)
        if not rows:
            raise InputError(f"{path} does not exist or has no results")
        for row in rows:
            cases.setdefault(tuple(row[name] for name in CASE), []).append(row)
    return [_grouped(rows) for rows in cases.values()]


def _grouped(rows: list[Row]) -> Results:
    keys = [tuple(row[name] for name in ENTRY) for row in rows]
    entries = {key: Entry(row) for key, row in zip(keys, rows, strict=True)}
    # ISO dates sort as text, and the sort keeps the order of equal ones.
    for key, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[1]["date"]):
        entries[key].rows[float(row["t"])] = entries[key].facts = row
    return Results(rows[0], list(entries.values()))
