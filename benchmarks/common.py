"""Shared parts of the benchmarks: data, entries, child processes, tables and output files."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.tables import write_rows
from lit_knn.estimators import Estimator
from lit_knn.index import Index

Rows = list[dict[str, Any]]


class Entry(NamedTuple):
    """An estimator and the index that it searches.

    Attributes:
        estimator: makes the estimator.
        search: makes its index, given the number of lists to search; None if it searches none.
        probes: numbers of lists to search, one after the other; [None] if the index has no lists.
    """

    estimator: Callable[[], Estimator]
    search: Callable[[int | None], Index] | None = None
    probes: Sequence[int | None] = (None,)

    def make_index(self, probe: int | None = None) -> Index | None:
        """Make the index, which searches `probe` lists."""
        return None if self.search is None else self.search(probe)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown. Its first row is the header."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]])


def cell(mean: float, standard_error: float) -> str:
    """Format a number with its standard error, if the error is known."""
    if math.isnan(mean):
        return ""
    return f"{mean:.1e}" + ("" if math.isnan(standard_error) else f" ± {standard_error:.1e}")


def number(value: float) -> str:
    """Format a whole number; NaN is empty."""
    return "" if math.isnan(value) else f"{value:.0f}"


class Output:
    """The output files of a benchmark, such as STEM.csv, one for each of `ends`. Without a stem, there are no files.

    Raises:
        InputError: one of the files exists already.
    """

    def __init__(self, stem: Path | None, *ends: str) -> None:
        self.stem = stem
        taken = next((path for path in map(self.path, ends) if path is not None and path.exists()), None)
        if taken is not None:
            raise InputError(f"--output: {taken} exists; nothing is overwritten")
        if stem is not None:
            stem.parent.mkdir(parents=True, exist_ok=True)

    def path(self, end: str) -> Path | None:
        """Return the path STEM.end, or None without a stem."""
        return None if self.stem is None else self.stem.with_name(f"{self.stem.name}.{end}")

    def write_rows(self, rows: Rows) -> None:
        """Write the rows so far."""
        if (path := self.path("csv")) is not None:
            write_rows(path, rows)

    def tell(self, text: str) -> None:
        """Print the tables and write them to STEM.md."""
        print(text)
        if (path := self.path("md")) is not None:
            with written_whole(path) as partial:
                partial.write_text(f"{text}\n")
