"""Differences of trained networks to those with another estimator, paired by seed: a table and two pictures.

    python -m benchmarks.learning_curves.differences noise_1000.csv noise_5000.csv --output noise_differences

The tables are those of `benchmarks.learning_curves`. Rows of several sets, such as one with 1,000 and one with 5,000
images, are drawn beside each other. OUTPUT.png has the differences, and OUTPUT_fit.png the loss at new images over the
error against the exact target, which tells whether an estimator generalises otherwise, or only fits less.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import Output, markdown
from benchmarks.learning_curves.difference_pictures import (
    EQUAL_ERROR,
    FIT,
    LEAST_LOSS,
    TITLES,
    Compared,
    fit_picture,
    picture,
)
from benchmarks.learning_curves.grid import REGRESSIONS, targets
from benchmarks.learning_curves.statistics import Curves, Value
from benchmarks.learning_curves.table import CurveTable
from benchmarks.learning_curves.titles import COMPARED, INTERVALS
from lit_knn.common.errors import InputError
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.common.tables import Row
from lit_knn.figures.style import save_figure


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, and write them and the pictures."""
    args = parse(arguments)
    with errors_in_one_line():
        files = Output(args.output, "md", "png")
        by_set = {}
        for name, curves in read(args.tables, args.module).items():
            if args.reference in curves.estimators:
                by_set[name] = compare(curves, args.module, args.reference, args.step)
        if not any(each.differences for each in by_set.values()):
            raise InputError(f"--reference: no run has a pair with {args.reference!r}")

        files.tell(table(by_set, args.reference))
        if args.output is None:
            return
        save_figure(picture(by_set, args.reference), args.output)
        fitted = {name: each for name, each in by_set.items() if EQUAL_ERROR in each.measures}
        if fitted:
            save_figure(fit_picture(fitted), args.output.with_name(f"{args.output.name}_fit"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", type=Path, help="tables of runs, .csv files")
    parser.add_argument("--module", default="EDM", help="the module of the runs")
    parser.add_argument("--reference", default="Exact", help="the estimator of the other runs")
    parser.add_argument("--step", type=int, help="the step to compare at; by default the last one")
    parser.add_argument("--output", type=Path, help="write OUTPUT.md, OUTPUT.png and OUTPUT.pdf")
    return parser.parse_args(arguments)


def read(paths: Sequence[Path], module: str) -> dict[str, Curves]:
    """Return the runs of a module by set. A run that several tables have is that of the first one.

    Raises:
        InputError: a table has no run of the module.
    """
    rows: dict[str, list[Row]] = {}
    seen = set()
    for path in paths:
        runs = {run: own for run, own in CurveTable(path).runs().items() if run.module == module}
        if not runs:
            raise InputError(f"{path} has no rows of {module}")
        for run, own in runs.items():
            if run not in seen:
                seen.add(run)
                rows.setdefault(run.set, []).extend(own)
    return {name: Curves(own, list(targets(name, module))) for name, own in rows.items()}


def compare(curves: Curves, module: str, reference: str, step: int | None) -> Compared:
    """Compare each other estimator with the reference at a step, or at the last one.

    Raises:
        InputError: not all runs were measured at the step.
    """
    if step is not None and step not in curves.steps:
        raise InputError(f"--step {step}: measured were {sorted(curves.steps)}")

    step = step or max(curves.steps)
    measures = {name: curves.at_step(name, step) for name in COMPARED if curves.measured(name)}
    # The loss of a consistency model does not say how far it is from the data's posterior mean.
    if module in REGRESSIONS and all(map(curves.measured, FIT)):
        measures[EQUAL_ERROR] = loss_at_equal_error(curves, reference, step)
        measures[LEAST_LOSS] = least_loss(curves)

    others = [
        name for name in curves.estimators if name != reference and curves.seeds(name, reference)
    ]
    by_estimator = {
        other: {
            name: curves.difference(value, other, reference, len(others))
            for name, value in measures.items()
        }
        for other in others
    }
    return Compared(curves, measures, by_estimator)


def loss_at_equal_error(curves: Curves, reference: str, step: int) -> Value:
    """Return a function of (estimator, seed): the loss at new images minus the reference's at the same error.

    The reference's loss is that of its run of the same seed, on the line between its measurements, where its error
    against the exact target is the one that the estimator has at the step. Where no measurement of the reference has so
    small or so large an error, it is NaN.
    """

    def value(estimator: str, seed: int) -> float:
        errors, losses = (curves.column(reference, seed, name) for name in FIT)
        order = errors.argsort()
        error, loss = (curves.at_step(name, step)(estimator, seed) for name in FIT)
        line = np.interp(error, errors[order], losses[order], left=math.nan, right=math.nan)
        return float(loss - line)

    return value


def least_loss(curves: Curves) -> Value:
    """Return a function of (estimator, seed): the least loss at new images, of the measurements that all runs have."""
    return lambda estimator, seed: float(curves.course(estimator, seed, "held_out_loss").min())


def table(by_set: dict[str, Compared], reference: str) -> str:
    """Return a table in Markdown for each set, with a row for each estimator."""
    parts = [
        f"Each estimator minus `{reference}`, paired by seed. {INTERVALS} The first row has the values of "
        f"`{reference}`, mean ± standard deviation over seeds. The loss at an equal error leaves out a run whose error "
        f"that of `{reference}` never has."
    ]
    for name, (curves, measures, by_estimator) in by_set.items():
        lines = [["estimator", "seeds", *(TITLES[each] for each in measures)]]
        spreads = [curves.spread(reference, value) for value in measures.values()]
        lines.append([f"`{reference}`", str(len(curves.seeds(reference))), *spreads])
        for estimator, differences in by_estimator.items():
            seeds = len(curves.seeds(estimator, reference))
            cells = [each.cell(seeds) for each in differences.values()]
            lines.append([estimator, str(seeds), *cells])
        parts += [f"## {name}", markdown(lines)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
