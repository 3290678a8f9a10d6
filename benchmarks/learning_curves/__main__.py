"""Learning curves of training modules by estimator: Fréchet distance, error and gradient variance.

    python -m benchmarks.learning_curves --output curves.csv
    python -m benchmarks.learning_curves --set cifar16 --images cifar10.zip --kept cifar16.npz --output x.csv

The command trains every run that the table lacks, one after the other, and adds its rows. Interrupted, it goes on with
the same command: from the last checkpoint, or on another machine from the runs in the table. Several processes with the
same command share the runs; each computes on one thread. ECT and sCT start from the EDM run of the same seed with
one-sample targets, and the score difference from that of iCT.
`--report` trains nothing: it draws the picture and writes the tables beside the file.
"""

import argparse
import logging
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.learning_curves.grid import MODULES, NEIGHBOURS, VARIANTS, runs_of
from benchmarks.learning_curves.report import report
from benchmarks.learning_curves.sets import Lengths, cifar, digits
from benchmarks.learning_curves.table import CurveTable
from benchmarks.learning_curves.worker import Worker
from lit_knn.common.lightning_log import lightning_messages
from lit_knn.common.one_line import errors_in_one_line


def main(arguments: list[str] | None = None) -> None:
    """Train the missing runs, or report those in the table."""
    args = parse(arguments)
    with lightning_messages(logging.ERROR), errors_in_one_line():
        table = CurveTable(args.output)
        if args.report:
            print(report(table))
            return
        # With another number of threads, sums are rounded otherwise, and rows of different processes would not compare.
        torch.set_num_threads(1)
        image_set = digits() if args.set == "digits" else cifar(args.set, args.images, args.kept)
        changed = {
            name: value for name in Lengths._fields if (value := getattr(args, name)) is not None
        }
        image_set = replace(image_set, lengths=image_set.lengths._replace(**changed).checked())
        runs = runs_of(args.set, args.modules, args.estimators, args.seeds, args.first_seed)
        Worker(image_set, table, args.checkpoints).run_all(runs)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=list(NEIGHBOURS), default="digits")
    parser.add_argument("--output", type=Path, required=True, help="the table, a .csv file")
    parser.add_argument("--images", type=Path, help="sets of CIFAR-10: zip or folder of its images")
    parser.add_argument(
        "--kept",
        type=Path,
        help="sets of CIFAR-10: .npz file of the images at the set's size, made if it is not there",
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("runs/learning_curves"), help="their folder"
    )
    parser.add_argument(
        "--modules",
        nargs="+",
        help=f"modules, in this order; by default all of {', '.join(MODULES)} that the set has. "
        f"Further ones: {', '.join(VARIANTS)}",
    )
    parser.add_argument("--estimators", nargs="+", help="estimators; by default all of the set")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of the seeds")
    for name in Lengths._fields:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            help="instead of the set's, see Lengths in sets.py",
        )
    parser.add_argument(
        "--report", action="store_true", help="only write tables and picture of the rows"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
