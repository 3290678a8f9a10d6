"""Reads the folders of training runs for `lit-knn report`."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lit_knn import estimators
from lit_knn.commands.cli.save_config import loggable
from lit_knn.common.checkpoint_file import KEPT_NAME, read_checkpoint_file
from lit_knn.common.errors import InputError, reading
from lit_knn.common.tables import (
    AVERAGES_PREFIX,
    CHECKPOINTS_PREFIX,
    FIDELITY_CSV,
    HELD_OUT,
    read_rows,
)
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.counts import DEFAULTS
from lit_knn.figures.training_curves import Points, TrainingCurve
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.names import Options, option_of, options_in
from lit_knn.runs.record import Record, read_record

# These columns of the tables are no metrics. All others are, except for standard deviations, `…_std`.
POINT_COLUMNS = {"step", "images_seen", "num_samples", "checkpoint", "seconds", "settings", "ema"}

Distances = dict[str, dict[int, float]]
"""The values of each metric, by the images seen."""


@dataclass(frozen=True)
class Run:
    """The content of a training run's folder, for the report."""

    folder: str
    # All settings that are not null, by dotted names.
    config: dict[str, str | int | float | bool]
    record: Record
    curve: TrainingCurve


def read_run(folder: str) -> Run:
    """Read the folder of a training run; raise InputError if a file is missing or damaged."""
    run = RunFolder(Path(folder))
    settings = run.config()
    record = read_record(run.path)

    name, k, n = estimator_of(settings, record.data.get("images", sys.maxsize))
    distances = read_distances(run.parts())
    return Run(
        folder,
        loggable(settings),
        record,
        TrainingCurve(folder, name, k, n, distances, ms_per_image(record)),
    )


def ms_per_image(record: Record) -> tuple[float, float]:
    """Return the milliseconds that a training took per image: in the estimator, and in all the rest."""
    time = record.time
    if not time.images:
        return 0.0, 0.0

    rest = time.seconds - time.estimator_seconds
    return 1000 * time.estimator_seconds / time.images, 1000 * rest / time.images


def estimator_of(settings: Options, images: int) -> tuple[str, int | None, int | None]:
    """Return class name, k and n of a run's estimator; the name is "-" for a model without an estimator.

    Args:
        settings: the configuration of the run.
        images: the number of its images, which limits k and n of some estimators.
    """
    estimator = option_of(settings["model"], "estimator") or {}
    options = options_in(estimator)
    name = estimator.get("class_path", "-").rpartition(".")[2]
    # For a class of this package, it is known which number null stands for.
    kind = getattr(estimators, name, None)

    counts: dict[str, int | None] = {}
    for option in ("k", "n"):
        value = options.get(option)
        if value is None and option in options and kind is not None and issubclass(kind, Estimator):
            value = DEFAULTS[option]
            if option in kind.limits:
                value = min(value, images)
        counts[option] = value
    return name, counts["k"], counts["n"]


def read_distances(parts: Sequence[Path]) -> dict[str, Points]:
    """Return the metrics that all parts of a training measured, as points of images seen and value.

    A metric that `best` measured is only taken from its table, in the folder of the last part.

    Args:
        parts: folders of the parts, in their order.
    """
    distances: Distances = {}
    for part in parts:
        rows = _read_table(part / FIDELITY_CSV)
        if distances:
            distances = _before(distances, _first_images_seen(part, rows))
        for metric, points in rows.items():
            distances[metric] = distances.get(metric, {}) | points

    for path in sorted(parts[-1].glob(f"{CHECKPOINTS_PREFIX}*.csv")):
        distances |= _read_table(path)
    return _as_points(distances)


def _first_images_seen(part: Path, rows: Distances) -> float:
    """Return the number of images seen from which on a part of a training replaces the part before.

    The part before may have gone on after the checkpoint that this part began with, but that is another
    branch of the training.

    Args:
        part: folder of the part.
        rows: the metrics that it measured.
    """
    begin = float("inf")
    for points in rows.values():
        begin = min(begin, *points)

    start = RunFolder(part).start()
    if start is not None:
        kept_name = KEPT_NAME.fullmatch(Path(start).name)
        # If the checkpoint was removed, only the first measurement counts.
        with suppress(InputError):
            if kept_name:
                seen = int(kept_name[1])
            else:
                seen = read_checkpoint_file(start, mmap=True).get("images_seen", 0)
            begin = min(begin, seen + 1)
    return begin


def _before(distances: Distances, begin: float) -> Distances:
    """Return the values that were measured at fewer images seen than `begin`."""
    earlier = {}
    for metric, points in distances.items():
        earlier[metric] = {seen: value for seen, value in points.items() if seen < begin}
    return earlier


def read_average(folder: Path, length: float) -> dict[str, Points]:
    """Return what `best` measured of the average of a relative length, from its tables in the folder of averages."""
    distances: Distances = {}
    for path in sorted(folder.glob(f"{AVERAGES_PREFIX}*.csv")):
        distances |= _read_table(path, length)
    return _as_points(distances)


def _as_points(distances: Distances) -> dict[str, Points]:
    """Return the metrics that have values, sorted by name, with their values sorted by images seen."""
    sorted_points: dict[str, Points] = {}
    for metric in sorted(distances):
        if distances[metric]:
            sorted_points[metric] = sorted(distances[metric].items())
    return sorted_points


def _read_table(path: Path, length: float | None = None) -> Distances:
    """Return the values of the metrics in a table, or nothing if the table is missing.

    Args:
        path: path of the table.
        length: the relative length of the average whose rows to read; None to read all rows.
    """
    if not path.is_file():
        return {}

    distances: Distances = {}
    # Somebody may have edited the table, so errors in it name the file.
    with reading(path):
        for row in read_rows(path):
            if length is not None and float(row["ema"]) != length:
                continue
            for metric in row.keys() - POINT_COLUMNS:
                is_deviation = metric.removesuffix(HELD_OUT).endswith("_std")
                if row[metric] not in ("", "nan") and not is_deviation:
                    points = distances.setdefault(metric, {})
                    points[int(row["images_seen"])] = float(row[metric])
    return distances
