"""Measure estimators of the posterior mean on frozen cases, and draw the page of results.

    lit-knn referee run --case digits --estimator KNN --estimator.k 256 [--output results.csv]
    lit-knn referee page results.csv [more.csv ...] --output STEM
    lit-knn referee cases

`--estimator` is a class with its arguments, a file of configs/estimators, `my_file.py:MyEstimator` with arguments, or
`my_file.py:function` for a callable (z, t, generator) -> mean. `run` may be left out. See docs/referee.md.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lit_knn.commands.cli.messages import refusal
from lit_knn.common.errors import InputError
from lit_knn.common.tables import text_table
from lit_knn.estimators import Estimator
from lit_knn.index import Index, exact_index
from lit_knn.referee import referee
from lit_knn.referee.cases import CASES
from lit_knn.referee.cases.loading import recorded
from lit_knn.referee.entry import with_own_files
from lit_knn.referee.protocol import Options
from lit_knn.referee.table import Rows

SHOWN = ("t", "mse", "mse_se", "bias_sq", "variance", "mse_ratio", "ms", "time_ratio", "certified_share")


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line. Raises InputError for bad input."""
    given = list(sys.argv[1:] if args is None else args)
    if given and given[0].startswith("--") and given[0] != "--help":
        given.insert(0, "run")
    if given[:1] == ["run"]:
        print(_run(given[1:]))
        return
    parser = argparse.ArgumentParser(
        prog="lit-knn referee", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="measure an estimator")
    page = commands.add_parser("page", help="draw the page of results")
    page.add_argument("results", nargs="+", type=Path, metavar="RESULTS.csv")
    page.add_argument("--output", type=Path, required=True, metavar="STEM", help="path without suffix")
    commands.add_parser("cases", help="list the cases")
    options = parser.parse_args(given)
    if options.command == "page":
        from lit_knn.referee.page import write_page

        print("\n".join(map(str, write_page(options.results, options.output))))
    else:
        print("\n".join(map(_about, CASES)))


def _run(args: list[str]) -> str:
    """Measure an estimator; return its name and a table of the main columns."""
    options = options_of(args)
    how = {name: options[name] for name in ("batch", "repeats", "threads", "cache", "latents")}
    given = {name: options[name] for name in ("name", "index", "data", "output")}
    given |= {"options": Options(**how, memory=not options.no_memory), "make": partial(_made, tuple(args))}
    return _text(referee(options.estimator, options.case, **given))


def _made(args: Sequence[str]) -> tuple[Estimator, Index]:
    """Make the estimator and the index that a command line names."""
    options = options_of(args)
    return options.estimator, options.index or exact_index()


def options_of(args: Sequence[str]) -> Any:
    """Parse the options of `run`; make the estimator, and the index if there is one."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="lit-knn referee run", exit_on_error=False, allow_abbrev=False)
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
    parser.add_subclass_arguments(Estimator, "estimator", required=False)
    parser.add_subclass_arguments(Index, "index", required=False)
    try:
        options = parser.parse_args(with_own_files(args))
        if options.estimator is None:
            raise InputError("--estimator is missing: give a class path, a .yaml file or my_file.py:Name")
        return parser.instantiate(options)
    except Exception as error:
        raise refusal(error) from error


def _about(name: str) -> str:
    """Describe a case in two lines."""
    case, known = CASES[name], len(recorded(CASES[name]))
    size, levels = " x ".join(map(str, case.shape[1:])), " ".join(f"{t:g}" for t in case.levels)
    data = "makes its data" if case.recipe is None else f"--data: {case.recipe}"
    told = f"{name}: {case.about}; N = {case.N:,}, {size}; t = {levels}; {case.latents} latents"
    return f"{told}\n    reference estimator KNN(k={case.k}, n={case.n}); {data}; {known or 'not'} recorded"


def _text(rows: Rows) -> str:
    shown = [{name: _short(row[name]) for name in SHOWN} for row in rows]
    first = rows[0]
    memory = f", memory {first['peak_mib']} MiB" if first["peak_mib"] != "" else ""
    told = f"{first['name']} on {first['case']}: set-up {first['setup_seconds']} s{memory}"
    return f"{told}\n{text_table(shown, dict.fromkeys(SHOWN, ''))}"


def _short(value: Any) -> str:
    return str(value) if value in ("", None) else f"{float(value):.3g}"
