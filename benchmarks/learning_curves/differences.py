"""Differences of trained networks to those with another estimator, paired by seed: a table and two pictures.

    python -m benchmarks.learning_curves.differences noise_1000.csv noise_5000.csv --output noise_differences

The tables are those of `benchmarks.learning_curves`. Rows of several sets, such as one with 1,000 and one with 5,000
images, are drawn beside each other. OUTPUT.png has the differences, and OUTPUT_fit.png the loss at new images over the
error against the exact target, which tells whether an estimator generalises otherwise, or only fits less.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.common import Output, markdown
from benchmarks.learning_curves.grid import REGRESSIONS, targets
from benchmarks.learning_curves.statistics import Curves, Difference
from benchmarks.learning_curves.table import CurveTable
from benchmarks.learning_curves.titles import COMPARED, FINAL, INTERVALS
from lit_knn.common.errors import InputError, errors_in_one_line
from lit_knn.common.tables import Row
from lit_knn.figures.style import Look, dress, looks, save_figure

FIT = ("val_error", "held_out_loss")
EQUAL_ERROR, LEAST_LOSS = "loss_at_equal_error", "least_loss"
TITLES = {name: FINAL[name] for name in COMPARED}
TITLES |= {EQUAL_ERROR: "loss at an equal error", LEAST_LOSS: "least loss at held-out images"}
DRAWN = ("held_out_loss", EQUAL_ERROR, "val_error", "fd_features", "fd_pixels")

Value = Callable[[str, int], float]
"""A number of a run, by its estimator and seed."""


class Compared(NamedTuple):
    """The runs of a set, what is compared by name, and the differences of each estimator by the same names."""

    curves: Curves
    measures: dict[str, Value]
    differences: dict[str, dict[str, Difference]]


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
    measures = {name: at_step(curves, name, step) for name in COMPARED if curves.measured(name)}
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


def at_step(curves: Curves, name: str, step: int) -> Value:
    """Return a function of (estimator, seed): a column at a step."""

    def value(estimator: str, seed: int) -> float:
        steps = curves.column(estimator, seed, "step")
        return float(curves.column(estimator, seed, name)[steps == step][0])

    return value


def loss_at_equal_error(curves: Curves, reference: str, step: int) -> Value:
    """Return a function of (estimator, seed): the loss at new images minus the reference's at the same error.

    The reference's loss is that of its run of the same seed, on the line between its measurements, where its error
    against the exact target is the one that the estimator has at the step. Beyond its measurements it is the nearest.
    """

    def value(estimator: str, seed: int) -> float:
        errors, losses = (curves.column(reference, seed, name) for name in FIT)
        order = errors.argsort()
        error, loss = (at_step(curves, name, step)(estimator, seed) for name in FIT)
        return float(loss - np.interp(error, errors[order], losses[order]))

    return value


def least_loss(curves: Curves) -> Value:
    """Return a function of (estimator, seed): the least loss at new images among the measurements."""
    return lambda estimator, seed: float(curves.column(estimator, seed, "held_out_loss").min())


def table(by_set: dict[str, Compared], reference: str) -> str:
    """Return a table in Markdown for each set, with a row for each estimator."""
    parts = [
        f"Each estimator minus `{reference}`, paired by seed. {INTERVALS} The first row has the values of "
        f"`{reference}`, mean ± standard deviation over seeds."
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


def picture(by_set: dict[str, Compared], reference: str) -> Figure:
    """Draw the intervals: a panel for each measure, a line for each estimator, a colour for each set."""
    estimators = list(dict.fromkeys(name for each in by_set.values() for name in each.differences))
    places = {name: -place for place, name in enumerate(estimators)}
    styles = looks(by_set)
    # The sets lie beside each other within the line of an estimator.
    shifts = dict(zip(by_set, np.linspace(0.2, -0.2, len(by_set) + 2)[1:-1], strict=True))

    drawn = [name for name in DRAWN if any(name in each.measures for each in by_set.values())]
    figure = Figure(figsize=(2.7 * len(drawn), 0.45 * len(estimators) + 1.4), layout="constrained")
    panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    for axes, measure in zip(panels, drawn, strict=True):
        axes.axvline(0, color="0.4", linewidth=0.8)
        for name, each in by_set.items():
            for estimator, differences in each.differences.items():
                if measure in differences and differences[measure].alone.seeds > 1:
                    height = places[estimator] + shifts[name]
                    _draw(axes, differences[measure], height, styles[name], name)
        dress(axes, title=TITLES[measure])
        axes.xaxis.set_major_locator(MaxNLocator(4))
    panels[0].set_yticks(list(places.values()), list(places))
    panels[0].set_ylabel(f"minus {reference}")
    lines = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False
    )
    return figure


def fit_picture(by_set: dict[str, Compared]) -> Figure:
    """Draw the loss at new images over the error against the exact target: thin lines for seeds, thick ones for means.

    The error falls along a training, so its axis is reversed. The first quarter of the measurements, in which both are
    far larger, is left out. A panel for each set.
    """
    figure = Figure(figsize=(4.2 * len(by_set), 3.8), layout="constrained")
    panels = figure.subplots(1, len(by_set), squeeze=False)[0]
    lines = {}
    for axes, (name, each) in zip(panels, by_set.items(), strict=True):
        curves = each.curves
        for estimator, style in looks(curves.estimators).items():
            for seed in curves.seeds(estimator):
                errors, losses = (curves.column(estimator, seed, column) for column in FIT)
                first = len(errors) // 4
                axes.plot(
                    errors[first:], losses[first:], color=style["color"], linewidth=0.6, alpha=0.5
                )
            (_, errors, _), (_, losses, _) = (curves.band(estimator, column) for column in FIT)
            first = len(errors) // 4
            lines[estimator] = axes.plot(errors[first:], losses[first:], **style)[0]
        dress(axes, title=name, xlabel=f"{FINAL['val_error']} (falls along the training)")
        axes.invert_xaxis()
    panels[0].set_ylabel(FINAL["held_out_loss"])
    figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)
    return figure


def _draw(axes: Axes, difference: Difference, height: float, style: Look, name: str) -> None:
    """Draw the interval that holds together with others as a thin line, and the one that holds alone over it."""
    mean, colour = difference.alone.mean, style["color"]
    axes.errorbar(mean, height, xerr=difference.together.half_width, color=colour, linewidth=0.7)
    axes.errorbar(
        mean,
        height,
        xerr=difference.alone.half_width,
        color=colour,
        marker=style["marker"],
        markersize=4,
        linewidth=2.2,
        label=name,
    )


if __name__ == "__main__":
    main()
