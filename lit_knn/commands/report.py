"""`lit-knn report RUN...` puts training runs side by side, as a Markdown table and a picture.

It reads `run.json`, `config.yaml` and the tables of distances in each run's folder. A training that was resumed
in another folder has several; the last one stands for all, and earlier ones are found.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.tables import CHECKPOINTS_PREFIX, FIDELITY_CSV, TITLES, read_rows
from lit_knn.figures.figure4.curves import HIGHER_IS_BETTER, read_estimator
from lit_knn.figures.run_comparison import ComparedRun, run_comparison
from lit_knn.figures.save import save_figure
from lit_knn.runs.folder import config_of_run
from lit_knn.runs.record import RECORD_NAME, Record, read_record
from lit_knn.sampling.schedules import ict_doublings

Points = list[tuple[int, float]]
# Options of LitICT that set N(k).
CURRICULUM = ("total_steps", "s0", "s1")
# These columns of the tables are no metrics.
POINT_COLUMNS = {"step", "images_seen", "num_samples", "checkpoint"}


@dataclass(frozen=True)
class Run:
    """Holds what `read_run` found in the folder of a training run.

    Attributes:
        folder: as given on the command line.
        estimator: class name, with k and n if it has them.
        config: all settings, by dotted names.
        record: what ran, where, and how long.
        distances: (images seen, value) in ascending order, by metric.
    """

    folder: str
    estimator: str
    config: dict[str, Any]
    record: Record
    distances: dict[str, Points]


def read_run(folder: str) -> Run:
    """Read the folder of a training run.

    Raises:
        InputError: a file is missing or damaged.
    """
    config = config_of_run(folder)
    name, k, n = read_estimator(Path(folder) / "config.yaml", "report")
    budget = ", ".join(f"{option}={value}" for option, value in (("k", k), ("n", n)) if value is not None)
    record = read_record(folder)
    return Run(folder, f"{name} {budget}".strip(), flat(config), record, read_distances(parts_of(folder, record)))


def parts_of(folder: str, record: Record) -> list[Path]:
    """List the folders of a training, from that of its first part that is still there to the given one."""
    parts = [Path(folder)]
    while record.resumed_from is not None:
        # The checkpoint is RUN/checkpoints/last.ckpt.
        before = Path(record.resumed_from).parent.parent
        if any(before.resolve() == part.resolve() for part in parts) or not (before / RECORD_NAME).is_file():
            break
        parts.insert(0, before)
        record = read_record(before)
    return parts


def trainings(folders: Sequence[str]) -> list[str]:
    """Leave out folders of `validate` and `predict`, which `runs/NAME/*` also names, with a line for each."""
    folders = list(dict.fromkeys(folders))
    recorded = [folder for folder in folders if (Path(folder) / RECORD_NAME).is_file()]
    if not recorded:
        return folders  # Reading them tells what is missing.
    for folder in folders:
        if folder not in recorded:
            print(f"left out: {folder} has no {RECORD_NAME}, which every training writes", file=sys.stderr)
    return recorded


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: {"model": {"lr": 1}} becomes {"model.lr": 1}; lists count from 0."""
    if isinstance(settings, dict):
        items: Any = settings.items()
    elif isinstance(settings, list):
        items = enumerate(settings)
    else:
        return {prefix: settings}
    found: dict[str, Any] = {}
    for name, value in items:
        # The level `init_args` says nothing to a reader.
        part = "" if name == "init_args" else f".{name}" if prefix else str(name)
        found |= flat(value, prefix + part)
    return found


def read_distances(parts: Sequence[Path]) -> dict[str, Points]:
    """Read `fidelity.csv` of all parts of a training, and the tables of `best` in the last, which have all parts.

    The tables of `best`, which have more samples, win.
    """
    found: dict[str, dict[int, float]] = {}
    for part in parts:
        for metric, points in _read_table(part / FIDELITY_CSV).items():
            found.setdefault(metric, {}).update(points)
    for path in sorted(parts[-1].glob(f"{CHECKPOINTS_PREFIX}*.csv")):
        found |= _read_table(path)
    return {metric: sorted(points.items()) for metric, points in sorted(found.items())}


def _read_table(path: Path) -> dict[str, dict[int, float]]:
    """Read the values of each metric by the images seen, from a table that may be missing."""
    if not path.is_file():
        return {}
    try:
        rows = read_rows(path)
        values = {
            metric: {int(row["images_seen"]): float(row[metric]) for row in rows if _number(row.get(metric))}
            for metric in set().union(*rows) - POINT_COLUMNS
        }
    except (KeyError, ValueError) as error:
        raise InputError(f"report: {path}: {error}") from error
    return {metric: points for metric, points in values.items() if points}


def _number(text: str | None) -> bool:
    try:
        return text is not None and float(text) == float(text)
    except ValueError:
        return False


def markdown(runs: Sequence[Run], baseline: Run) -> str:
    """Make the report: results and circumstances of each run, then the settings that differ."""
    names = ["run", *(run.folder for run in runs)]
    results = [[label, *(tell(run) for run in runs)] for label, tell in result_rows(runs, baseline)]
    lines = ["# Training runs", "", *table([names, *results]), ""]
    lines.append(f"Time per image is relative to {baseline.folder} ({baseline.estimator}), without validations.")
    if len(runs) > 1:
        lines.append("Trainings of other seeds tell how much of a difference between the distances is chance.")
    for run in runs:
        unrecorded = run.record.images_seen - run.record.time.images
        if unrecorded > 0:
            lines.append(f"The time of {run.folder} is without its first {unrecorded:,} images.")
    differing = differences(runs)
    lines += ["", "## Settings that differ", ""]
    lines += table([["setting", *names[1:]], *differing]) if differing else ["None."]
    return "\n".join(lines) + "\n"


def result_rows(runs: Sequence[Run], baseline: Run) -> list[tuple[str, Callable[[Run], str]]]:
    """List the rows of the first table: a label, and a function from a run to its cell."""

    def best(metric: str) -> Callable[[Run], str]:
        return lambda run: best_of(run.distances.get(metric, []), metric)

    def relative(run: Run) -> str:
        own, reference = run.record.time.images_per_second, baseline.record.time.images_per_second
        return f"{reference / own:.1%}" if own > 0 and reference > 0 else "-"

    metrics = dict.fromkeys(metric for run in runs for metric in run.distances)
    return [
        ("estimator", lambda run: run.estimator),
        ("seed", lambda run: str(run.config.get("seed_everything", "-"))),
        ("status", lambda run: run.record.status),
        ("steps", lambda run: f"{run.record.step:,}"),
        ("images seen", lambda run: f"{run.record.images_seen:,}"),
        *(row for metric in metrics for row in [(TITLES.get(metric, metric), best(metric)), *level_row(runs, metric)]),
        ("hours of training", lambda run: f"{run.record.time.seconds / 3600:.3g}"),
        ("images/s", lambda run: f"{run.record.time.images_per_second:.4g}" if run.record.time.seconds else "-"),
        ("estimator's share", lambda run: f"{run.record.time.estimator_share:.1%}" if run.record.time.seconds else "-"),
        ("time per image", relative),
        ("memory, GPU", lambda run: f"{run.record.memory_gb:.2f} GB, {run.record.gpu_memory_gb:.2f} GB"),
        ("hardware", lambda run: "; ".join(run.record.time.hardware) or "-"),
        ("data", lambda run: " ".join(str(value) for value in _data(run.record.data))),
        ("revision", lambda run: run.record.revision or "-"),
        ("started", lambda run: run.record.started),
    ]


def level_row(runs: Sequence[Run], metric: str) -> list[tuple[str, Callable[[Run], str]]]:
    """Compare runs of unequal lengths after the last number of images at which all that have the metric measured it."""
    measured = [dict(run.distances[metric]) for run in runs if metric in run.distances]
    shared = set.intersection(*(set(points) for points in measured))
    if len({max(points) for points in measured}) == 1 or not shared:
        return []
    level = max(shared)

    def value(run: Run) -> str:
        points = dict(run.distances.get(metric, []))
        return f"{points[level]:.4g}" if points else "-"

    return [(f"{TITLES.get(metric, metric)} at {level:,} images", value)]


def _data(data: dict[str, Any]) -> list[str]:
    """Name the data in a few words; the first 8 digits of the fingerprint tell other images apart."""
    words = [str(data.get("class", "-"))]
    if "images" in data:
        words.append(f"{data['images']:,} x {'x'.join(map(str, data['shape']))}{' flipped' if data['hflip'] else ''}")
        words.append(f"({data['fingerprint'][:8]})")
    return words


def compared(run: Run) -> ComparedRun:
    """Select what the picture shows."""
    time = run.record.time
    estimator, rest = time.estimator_seconds, time.seconds - time.estimator_seconds
    ms = (1000 * estimator / time.images, 1000 * rest / time.images) if time.images else (0.0, 0.0)
    return ComparedRun(f"{run.folder} {run.estimator}", ms, run.distances, doublings_of(run))


def doublings_of(run: Run) -> list[float]:
    """Return the images seen where N(k) of a run of LitICT doubled; no numbers for another model."""
    options = [value for name in CURRICULUM if isinstance(value := run.config.get(f"model.{name}"), int)]
    if len(options) < len(CURRICULUM) or not run.record.step:
        return []
    images_per_step = run.record.images_seen / run.record.step
    return [step * images_per_step for step in ict_doublings(*options) if step <= run.record.step]


def best_of(points: Points, metric: str) -> str:
    """Tell the best value and when it was reached, and the last one if it differs; "-" without values."""
    if not points:
        return "-"
    best = (max if metric in HIGHER_IS_BETTER else min)(points, key=lambda point: point[1])
    last = "" if best == points[-1] else f", at the end {points[-1][1]:.4g}"
    return f"{best[1]:.4g} at {best[0]:,}{last}"


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """List what differs between the runs: settings, then versions and number of processes."""
    versions = [{"python": run.record.python, "processes": run.record.processes, **run.record.packages} for run in runs]
    rows = []
    for sources in ([run.config for run in runs], versions):
        for name in dict.fromkeys(name for source in sources for name in source):
            values = [str(source.get(name, "-")) for source in sources]
            if len(set(values)) > 1:
                rows.append([name, *values])
    return rows


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Make the lines of a Markdown table; the first row is the header."""
    lines = ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def main(args: Sequence[str] | None = None) -> None:
    """Print the report of the runs on the command line, and write it with its picture.

    Raises:
        InputError: a file of the report is there already without `--overwrite`, or the folder of a run lacks a file or
            has a damaged one.
    """
    parser = argparse.ArgumentParser(
        prog="lit-knn report",
        description="Put training runs side by side: distances, speed, data, versions, and the settings that differ.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a training run, such as runs/demo/knn_0")
    parser.add_argument(
        "--baseline", help="the run to compare times with; by default the first one of OneSample, else the first"
    )
    parser.add_argument("--output", default="report", help="path of the files, without .md, .png and .pdf")
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier report")
    options = parser.parse_args(args)
    if not Path(options.output).name:
        raise InputError(f"report: --output {options.output!r} is no name of a file")
    written = [Path(f"{options.output}.{suffix}") for suffix in ("md", "png", "pdf")]
    taken = next((path for path in written if path.exists()), None)
    if taken is not None and not options.overwrite:
        raise InputError(
            f"report: --output {options.output}: {taken} is there already; give another path or --overwrite"
        )
    folder = next((path for path in written if path.is_dir()), None)
    if folder is not None:
        raise InputError(f"report: --output {options.output}: {folder} is a folder; give another path")
    runs = [read_run(folder) for folder in trainings(options.runs)]
    plain = [run for run in runs if run.estimator == "OneSample"]
    text = markdown(runs, read_run(options.baseline) if options.baseline else [*plain, *runs][0])
    print(text)
    with written_whole(written[0]) as partial:
        partial.write_text(text, encoding="utf-8")
    save_figure(run_comparison([compared(run) for run in runs]), options.output)
    print(f"Written: {', '.join(map(str, written))}")
