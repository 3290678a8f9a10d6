"""Memorisation over training time against the number of images N, on the digits (arXiv 2505.17638).

    python -m benchmarks.memorisation --output benchmarks/results/memorisation_digits_cpu.csv

The command trains every run that the table lacks, one after the other, and adds a row at each measurement. Interrupted,
it goes on with the same command from the last checkpoint. Several processes with the same command share the runs; each
computes on one thread. A run ends when the share `--until-copied` of its samples are copies, or at `--steps`. With a
larger `--steps`, the runs that ended there go on. `--report` trains nothing: it draws the picture and writes the tables
beside the file.
"""

import argparse
import logging
from pathlib import Path

import torch

from benchmarks.memorisation.report import report
from benchmarks.memorisation.runs import ESTIMATORS, Lengths, runs_of
from benchmarks.memorisation.table import MemorisationTable
from benchmarks.memorisation.times import COPIED_LEVELS
from benchmarks.memorisation.worker import Worker
from lit_knn.common.errors import InputError, told_in_one_line


def main(arguments: list[str] | None = None) -> None:
    """Train the missing runs, or report those in the table."""
    args = parse(arguments)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with told_in_one_line():
        changed = {name: value for name in Lengths._fields if (value := getattr(args, name)) is not None}
        lengths = Lengths(**changed).checked()
        if not max(COPIED_LEVELS) <= args.until_copied <= 1:
            raise InputError(f"--until-copied must be from {max(COPIED_LEVELS)} to 1, got {args.until_copied}")
        steps = lengths.steps(args.steps)
        if not steps:
            raise InputError(f"--steps {args.steps} is before the first measurement, --first {lengths.first}")
        table = MemorisationTable(args.output, steps[-1], args.until_copied)
        if args.report:
            print(report(table))
            return
        # With another number of threads, sums are rounded otherwise, and rows of different processes would not compare.
        torch.set_num_threads(1)
        runs = runs_of(args.estimators, args.images, args.seeds, lengths)
        Worker(table, lengths, args.checkpoints).run_all(runs)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the table, a .csv file")
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/memorisation"), help="their folder")
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS), help="estimators, in this order")
    parser.add_argument("--images", nargs="+", type=int, default=[100, 200, 400, 800, 1437], help="values of N")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=40_000, help="the longest run")
    parser.add_argument("--until-copied", type=float, default=0.25, help="a run ends at this copied fraction")
    for name, default in Lengths._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"see Lengths in runs.py; {default}")
    parser.add_argument("--report", action="store_true", help="only write tables and picture of the rows")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
