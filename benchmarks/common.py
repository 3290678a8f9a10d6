"""Shared parts of the benchmarks: entries, the simplest rival, tables, output files and processes."""

import argparse
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.tables import Row, read_rows, write_rows
from lit_knn.estimators import Estimator
from lit_knn.index import Index
from lit_knn.reference import ReferenceSet

Rows = list[dict[str, Any]]


class Entry(NamedTuple):
    """Makes an estimator, and the index that it searches, if it does."""

    estimator: Callable[[], Estimator]
    search: Callable[[], Index] | None = None


class ThreeLines(Estimator):
    """The exact mean in three lines of PyTorch: the rival to beat. Float32; images and norms are prepared before."""

    deterministic = True

    def bind(self, reference: ReferenceSet) -> Self:
        super().bind(reference)
        self.x = reference.take(torch.arange(reference.N, device=reference.device)).flatten(1)
        self.half_sq_norms = self.x.square().sum(1) / 2
        return self

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        log_p = (z.flatten(1) @ self.x.T - self.half_sq_norms) / t.flatten(1).float() ** 2
        return (torch.softmax(log_p, dim=1) @ self.x).reshape(z.shape)


def checkpoint_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a benchmark that measures one checkpoint and adds its rows to a file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--about", default="", help="what the rows say of the weights")
    parser.add_argument("--output", type=Path, required=True, help="the rows, a .csv file")
    return parser


def add_rows(path: Path, measure: Callable[[], Iterable[Row]]) -> None:
    """Measure rows, print them, and add them to a file, which need not exist. It is read first."""
    rows: Rows = read_rows(path) if path.exists() else []
    for row in measure():
        print(row)
        rows.append(row)
    write_rows(path, rows)


def in_own_process(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work(*args)` in a new process and return its result. An error there is raised here."""
    spawn, threads = multiprocessing.get_context("spawn"), (torch.get_num_threads(),)

    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, threads) as pool:
        try:
            return pool.submit(work, *args).result()
        except BrokenProcessPool as error:
            raise InputError("a process was killed; memory may be short") from error


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
        taken = next(
            (path for path in map(self.path, ends) if path is not None and path.exists()), None
        )
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
