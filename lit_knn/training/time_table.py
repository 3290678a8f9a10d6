"""Makes a Markdown table of training times (tab:consistency_runtime) from the folders of several runs.

`python -m lit_knn.training.time_table RUN_FOLDER... [--baseline RUN_FOLDER]` reads the files of `callbacks.RunSummary`.
The last folder of a resumed training has its whole time. Validations are not counted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lit_knn.errors import InputError
from lit_knn.figures.figure4.curves import read_estimator
from lit_knn.results import TRAINING_TIME_JSON
from lit_knn.training.times import TrainingTime

HEADER = ("run", "estimator", "hours", "images", "images/s", "estimator's share", "time per image", "hardware")


class Run(NamedTuple):
    """One row of the table.

    Attributes:
        folder: the run's folder.
        estimator: its name and budget.
        time: the training time.
        unrecorded: number of images seen before time was recorded.
    """

    folder: Path
    estimator: str
    time: TrainingTime
    unrecorded: int


def read_run(folder: str | Path) -> Run:
    """Read config.yaml and training_time.json of a run's folder.

    Raises:
        InputError: a file is missing or damaged, or no time was recorded.
    """
    folder = Path(folder)
    name, k, n = read_estimator(folder / "config.yaml", "training_time")
    budget = ", ".join(f"{option}={value}" for option, value in (("k", k), ("n", n)) if value is not None)
    path = folder / TRAINING_TIME_JSON
    if not path.is_file():
        raise InputError(f"training_time: {path}: no such file; the run must have callbacks.RunSummary")
    try:
        record = json.loads(path.read_text())
        hardware, seen = tuple(map(str, record["hardware"])), int(record["images_seen"])
        time = TrainingTime(
            float(record["seconds"]), int(record["images"]), float(record["estimator_seconds"]), hardware
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"training_time: {path} is damaged: {error!r}") from error
    if not (time.seconds > 0 and time.images > 0):
        raise InputError(f"training_time: {path} records no training")
    return Run(folder, f"{name} {budget}".strip(), time, max(seen - time.images, 0))


def table(runs: Sequence[Run], baseline: Run) -> str:
    """Make the Markdown table; the times per image are relative to `baseline`."""
    rows = [HEADER, ("---",) * len(HEADER)]
    reference = baseline.time.images_per_second
    for run in runs:
        time = run.time
        rows.append(
            (
                str(run.folder),
                run.estimator,
                f"{time.seconds / 3600:.3g}" + (" *" if run.unrecorded else ""),
                f"{time.images:,}",
                f"{time.images_per_second:.4g}",
                f"{time.estimator_share:.1%}",
                f"{reference / time.images_per_second:.1%}",
                "; ".join(time.hardware),
            )
        )
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines += ["", f"Time per image is relative to {baseline.folder} ({baseline.estimator})."]
    lines += [f"* {run.folder}: without its first {run.unrecorded:,} images." for run in runs if run.unrecorded]
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> None:
    """Print the table of the runs on the command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m lit_knn.training.time_table", description=description)
    parser.add_argument("folders", nargs="+", metavar="RUN_FOLDER", help=f"holds config.yaml and {TRAINING_TIME_JSON}")
    parser.add_argument(
        "--baseline", help="folder to compare with; by default the first run of OneSample, else the first"
    )
    options = parser.parse_args(args)
    try:
        runs = [read_run(folder) for folder in options.folders]
        plain = [run for run in runs if run.estimator == "OneSample"]
        baseline = read_run(options.baseline) if options.baseline else [*plain, *runs][0]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(table(runs, baseline))


if __name__ == "__main__":
    main()
