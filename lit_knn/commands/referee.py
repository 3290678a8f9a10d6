"""Measure estimators of the posterior mean on frozen cases, and draw the page of results.

    lit-knn referee run --case digits --estimator KNN --estimator.k 256 [--output results.csv]
    lit-knn referee page results.csv [more.csv ...] --output STEM
    lit-knn referee cases
    lit-knn referee record --case digits

`--estimator` is a class path with its arguments, a file of configs/estimators, `my_file.py:MyEstimator` with arguments,
or `my_file.py:function` for a callable (z, t, generator) -> mean. `run` may be left out. See docs/referee.md.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.common.tables import text_table
from lit_knn.referee.cases import CASES, case_named
from lit_knn.referee.cases.loading import record_case
from lit_knn.referee.cases.recording import recorded_data
from lit_knn.referee.command import measure
from lit_knn.referee.entry import entry_from_arguments
from lit_knn.referee.protocol import Options
from lit_knn.referee.table import Rows

SHOWN = ("t", "mse", "mse_se", "bias_sq", "variance", "mse_ratio", "ms", "time_ratio", "ms_one", "certified_share")


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line; bad input ends it with one line and exit status 2."""
    given = list(sys.argv[1:] if args is None else args)
    if given and given[0].startswith("--") and given[0] != "--help":
        given.insert(0, "run")
    parser = argparse.ArgumentParser(
        prog="lit-knn referee", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands.add_parser("run", help="measure an estimator", allow_abbrev=False))
    page = commands.add_parser("page", help="draw the page of results")
    page.add_argument("results", nargs="+", type=Path, metavar="RESULTS.csv")
    page.add_argument("--output", type=Path, required=True, metavar="STEM", help="path without suffix")
    commands.add_parser("cases", help="list the cases")
    recording = commands.add_parser("record", help="for maintainers: record hashes and exact means of a case")
    recording.add_argument("--case", required=True, metavar="NAME", help="a case whose data or levels are new")
    recording.add_argument("--data", type=Path, metavar="PATH", help="the images, if the case asks")
    recording.add_argument("--cache", type=Path, metavar="FOLDER", help="folder of exact means")
    options, rest = parser.parse_known_args(given)
    if rest and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    with told_in_one_line(), _stopped_in_one_line():
        {"run": _run, "page": _page, "cases": _cases, "record": _record}[options.command](options, rest)


@contextmanager
def _stopped_in_one_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        print("stopped; the finished noise levels are in the table", file=sys.stderr)
        raise SystemExit(130) from error


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", required=True, metavar="NAME", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--name", help="name in the table; default: class and arguments")
    parser.add_argument("--data", type=Path, metavar="PATH", help="zip, folder or .npy of the images, if the case asks")
    parser.add_argument("--output", type=Path, metavar="CSV", help="table that the rows are added to")
    parser.add_argument("--batch", type=int, metavar="B", help="latents in a call; default 128")
    parser.add_argument("--repeats", type=int, metavar="R", help="default: the case's")
    parser.add_argument("--threads", type=int, metavar="T", help="default: all")
    parser.add_argument("--latents", type=int, metavar="L", help="only the first L latents, for a quick look")
    parser.add_argument("--no_memory", action="store_true", help="do not measure memory, which takes another process")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="exact means; default ~/.cache/lit_knn/referee")
    parser.epilog = "--estimator NAME [--estimator.ARG VALUE ...] [--index NAME [--index.ARG VALUE ...]]"


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    for text in rest:
        if text.startswith("--") and text.lstrip("-").split("=")[0].split(".")[0] not in ("estimator", "index"):
            raise InputError(f"{text.split('=')[0]}: no such option; see lit-knn referee run --help")
    for option in ("batch", "repeats", "threads"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise InputError(f"--{option} must be at least 1, got {value}")
    entry = entry_from_arguments(rest, options.name)
    how = Options(options.batch, options.repeats, options.threads, not options.no_memory)
    rows = measure(entry, options.case, options.data, options.output, options.latents, how, options.cache)
    print(_text(rows))


def _page(options: argparse.Namespace, rest: list[str]) -> None:
    from lit_knn.referee.page import write_page

    print("\n".join(map(str, write_page(options.results, options.output))))


def _cases(options: argparse.Namespace, rest: list[str]) -> None:
    for case in CASES.values():
        size = " x ".join(map(str, case.shape[1:]))
        data = "makes its data" if case.make is not None else f"--data: {case.recipe}"
        known = len(recorded_data(case))
        verified = f"{known} recorded" if known else "not recorded"
        levels = " ".join(f"{t:g}" for t in case.levels)
        print(f"{case.name}: {case.about}; N = {case.N:,}, {size}; t = {levels}; {case.latents} latents")
        print(f"    reference estimator KNN(k={case.k}, n={case.n}); {data}; {verified}")


def _record(options: argparse.Namespace, rest: list[str]) -> None:
    print(record_case(case_named(options.case), options.data, options.cache))


def _text(rows: Rows) -> str:
    """Return the main columns as a plain table, with the name above."""
    shown = [{name: _short(row[name]) for name in SHOWN} for row in rows]
    first = rows[0]
    told = f"{first['name']} on {first['case']}: set-up {first['setup_seconds']} s, memory {first['peak_mib']} MiB"
    return f"{told}\n{text_table(shown, dict.fromkeys(SHOWN, ''))}"


def _short(value: Any) -> str:
    return str(value) if value in ("", None) else f"{float(value):.3g}"
