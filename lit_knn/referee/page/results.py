"""Read tables of results, and group their rows by case and entry."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_knn.common.errors import InputError
from lit_knn.referee.table import MACHINE, read_table

MACHINE_AND_THREADS = (*MACHINE, "threads")
# The identity of an entry, apart from its case.
ENTRY = ("name", "settings", "origin", *MACHINE_AND_THREADS, "batch")
CASE = ("case", "data", "N", "d")
# Columns that hold a number or nothing. The others hold text.
NUMBERS = (
    "t mse mse_se bias_sq bias_sq_se variance variance_se score_mse score_mse_se mse_ratio mse_ratio_se exact_error ms"
    " ms_low ms_high reference_ms time_ratio time_ratio_low time_ratio_high ms_one setup_seconds peak_mib certified_mse"
    " certified_share certified_spread"
)


@dataclass
class Entry:
    """One estimator on one machine.

    Attributes:
        facts: any row of it; use only columns that are the same at all noise levels.
        rows: the row of each noise level.
    """

    facts: dict[str, str]
    rows: dict[float, dict[str, str]] = field(default_factory=dict)

    def value(self, t: float, column: str) -> float:
        """Return a number at noise level t; NaN if it was not measured."""
        text = self.rows.get(t, {}).get(column, "")
        return float(text) if text else math.nan

    def values(self, column: str) -> list[float]:
        """Return the numbers of a column at the noise levels where it was measured."""
        return [value for t in self.rows if not math.isnan(value := self.value(t, column))]

    def mean(self, column: str) -> float:
        """Return the mean of a column over the noise levels where it was measured; NaN if there is none."""
        values = self.values(column)
        return sum(values) / len(values) if values else math.nan

    @property
    def name(self) -> str:
        """Name for readers."""
        return self.facts["name"]

    @property
    def machine(self) -> tuple[str, ...]:
        """Processor, cores, memory and threads, which tell machines apart."""
        return tuple(self.facts[column] for column in MACHINE_AND_THREADS)


@dataclass
class Results:
    """Holds all entries that were measured on one case with the same data.

    Attributes:
        case: name.
        facts: any row of it; use only the columns of `CASE`.
        entries: in order of appearance.
        older: the number of rows that a later measurement of the same entry replaces.
    """

    case: str
    facts: dict[str, str]
    entries: list[Entry]
    older: int

    @property
    def levels(self) -> list[float]:
        """All noise levels, ascending."""
        return sorted({t for entry in self.entries for t in entry.rows})

    @property
    def machines(self) -> list[tuple[str, ...]]:
        """All machines, in order of appearance."""
        return list(dict.fromkeys(entry.machine for entry in self.entries))

    def values(self, column: str) -> list[float]:
        """Return the numbers of a column of all entries."""
        return [value for entry in self.entries for value in entry.values(column)]

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
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for path in paths:
        for row in _rows(path):
            groups.setdefault(tuple(row[name] for name in CASE), []).append(row)
    return [_grouped(rows) for rows in groups.values()]


def _grouped(rows: list[dict[str, str]]) -> Results:
    entries: dict[tuple[str, ...], Entry] = {}
    older = 0
    # ISO dates sort as text, and the sort keeps the order of equal ones.
    for row in sorted(rows, key=lambda row: row["date"]):
        entry = entries.setdefault(tuple(row[name] for name in ENTRY), Entry(row))
        older += float(row["t"]) in entry.rows
        entry.rows[float(row["t"])] = entry.facts = row
    order = dict.fromkeys(tuple(row[name] for name in ENTRY) for row in rows)
    return Results(rows[0]["case"], rows[0], [entries[key] for key in order], older)


def _rows(path: Path) -> list[dict[str, str]]:
    """Read and check the rows of one file."""
    rows = read_table(path)
    if not rows:
        raise InputError(f"{path} does not exist or has no results")
    for line, row in enumerate(rows, start=2):
        _check_numbers(row, f"{path}: line {line}")
    return rows


def _check_numbers(row: dict[str, str], place: str) -> None:
    for name in NUMBERS.split():
        try:
            value = float(row[name] or "nan")
        except ValueError as error:
            raise InputError(f"{place}: {name} is {row[name]!r}, which is no number") from error
        if name == "t" and not 0 < value < math.inf:
            raise InputError(f"{place}: t is {row[name]!r}, not a positive number")
