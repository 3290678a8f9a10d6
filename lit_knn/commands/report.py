"""`lit-knn report RUN...` puts training runs side by side. The last folder of a resumed run stands for all."""

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_knn import estimators
from lit_knn.commands.cli.save_config import pairs
from lit_knn.common.checkpoint_file import KEPT_NAME, read_checkpoint_file
from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.tables import AVERAGES_PREFIX, CHECKPOINTS_PREFIX, FIDELITY_CSV, HELD_OUT, TITLES, read_rows
from lit_knn.data.files import reading
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.counts import DEFAULTS
from lit_knn.figures.style import save_figure
from lit_knn.figures.training_curves import Points, TrainingCurve, best_point, figure4, run_comparison, varied
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.record import RECORD_NAME, Record, read_record

# All other columns of the tables are metrics, but for deviations, `…_std`.
POINT_COLUMNS = {"step", "images_seen", "num_samples", "checkpoint", "seconds", "settings", "ema"}


@dataclass(frozen=True)
class Run:
    """Holds what is in the folder of a training run; `config` has all settings but null, by dotted names."""

    folder: str
    config: dict[str, Any]
    record: Record
    curve: TrainingCurve


def read_run(folder: str) -> Run:
    """Read the folder of a training run; raise InputError if a file is missing or damaged."""
    run = RunFolder(Path(folder))
    settings, record = run.config(), read_record(run.path)
    config = dict(pair for name, value in settings.items() for pair in pairs(name, value))
    time, ms_per_image = record.time, (0.0, 0.0)
    if time.images:
        rest = time.seconds - time.estimator_seconds
        ms_per_image = (1000 * time.estimator_seconds / time.images, 1000 * rest / time.images)
    estimator = estimator_of(settings, record.data.get("images", sys.maxsize))
    curve = TrainingCurve(folder, *estimator, read_distances(run.parts()), ms_per_image)
    return Run(folder, config, record, curve)


def estimator_of(settings: dict[str, Any], images: int) -> tuple[str, int | None, int | None]:
    """Return class name, k and n of the estimator of a run's configuration; "-" for a model without an estimator."""
    estimator = settings["model"].get("init_args", {}).get("estimator") or {}
    options, name = estimator.get("init_args") or {}, estimator.get("class_path", "-").rpartition(".")[2]
    counts = {option: options[option] for option in ("k", "n") if option in options}
    # A run keeps null for a default. The classes of this package tell what it stands for.
    kind = getattr(estimators, name, Estimator)
    for option, value in counts.items():
        if value is None and kind is not Estimator:
            default = DEFAULTS[option]
            counts[option] = min(default, images) if option in kind.limits else default
    return name, counts.get("k"), counts.get("n")


def read_distances(parts: Sequence[Path]) -> dict[str, Points]:
    """Read `fidelity.csv` of all parts of a training; the tables of `best` in the last part take precedence."""
    found: dict[str, dict[int, float]] = {}
    for part in parts:
        rows = _read_table(part / FIDELITY_CSV)
        # The part before may have gone on after the checkpoint that this part began with.
        begin = min((seen for points in rows.values() for seen in points), default=math.inf)
        if found and (start := RunFolder(part).start()) is not None:
            named = KEPT_NAME.fullmatch(Path(start).name)
            with suppress(InputError):  # It may be gone.
                seen = int(named[1]) if named else read_checkpoint_file(start, mmap=True).get("images_seen", 0)
                begin = min(begin, seen + 1)
        for metric in found.keys() | rows.keys():
            earlier = {seen: value for seen, value in found.get(metric, {}).items() if seen < begin}
            found[metric] = earlier | rows.get(metric, {})
    for path in sorted(parts[-1].glob(f"{CHECKPOINTS_PREFIX}*.csv")):
        found |= _read_table(path)
    return {metric: sorted(points.items()) for metric, points in sorted(found.items()) if points}


def read_average(folder: Path, length: float) -> dict[str, Points]:
    """Read what `best` measured of the average of a relative length, from the tables in the folder of averages."""
    tables = [_read_table(path, length) for path in sorted(folder.glob(f"{AVERAGES_PREFIX}*.csv"))]
    return {metric: sorted(points.items()) for found in tables for metric, points in sorted(found.items())}


def _read_table(path: Path, length: float | None = None) -> dict[str, dict[int, float]]:
    """Read the values of each metric by the images seen, from a table that may be missing; of one average if given."""
    found: dict[str, dict[int, float]] = {}
    with reading(path):  # Somebody may have edited it.
        for row in read_rows(path) if path.is_file() else ():
            if length is not None and float(row["ema"]) != length:
                continue
            for metric in row.keys() - POINT_COLUMNS:
                if row[metric] not in ("", "nan") and not metric.removesuffix(HELD_OUT).endswith("_std"):
                    found.setdefault(metric, {})[int(row["images_seen"])] = float(row[metric])
    return found


def markdown(runs: Sequence[Run]) -> str:
    """Make the report; times are compared with those of the first one-sample run, or else of the first run."""
    baseline = next((run for run in runs if run.curve.estimator == "OneSample"), runs[0])
    columns = [cells(run, runs, baseline) for run in runs]
    results = [[label, *(column[label] for column in columns)] for label in columns[0]]
    lines = ["# Training runs", "", *table(results), ""]
    lines.append(f"Time per image is relative to {baseline.folder} ({baseline.curve.method}), without validations.")
    if len(runs) > 1:
        lines.append("Trainings of other seeds show how much of a difference between the distances is chance.")
    differing = differences(runs)
    lines += ["", "## Settings that differ", ""]
    lines += table([["setting", *(run.folder for run in runs)], *differing]) if differing else ["None."]
    return "\n".join(lines) + "\n"


def cells(run: Run, runs: Sequence[Run], baseline: Run) -> dict[str, str]:
    """Return the column of a run in the first table, by row label. The labels are those of all `runs`."""
    record, time, speed = run.record, run.record.time, baseline.record.time.images_per_second
    relative = f"{speed / time.images_per_second:.1%}" if time.images_per_second > 0 and speed > 0 else "-"
    data = record.data
    words = [str(data.get("class", "-"))]
    if "images" in data:  # The first digits of the fingerprint distinguish other images.
        words.append(f"{data['images']:,} x {'x'.join(map(str, data['shape']))}{' flipped' if data['hflip'] else ''}")
        words.append(f"({data['fingerprint'][:8]})")
    return {
        "run": run.folder,
        "estimator": run.curve.method,
        "seed": str(run.config.get("seed_everything", "-")),
        "status": record.status,
        "steps": f"{record.step:,}",
        "images seen": f"{record.images_seen:,}",
        **distance_cells(run, runs),
        "hours of training": f"{time.seconds / 3600:.3g}",
        "images/s": f"{time.images_per_second:.4g}" if time.seconds else "-",
        "estimator's share": f"{time.estimator_share:.1%}" if time.seconds else "-",
        "time per image": relative,
        "memory, GPU": f"{record.memory_gb:.2f} GB, {record.gpu_memory_gb:.2f} GB",
        "hardware": "; ".join(time.hardware) or "-",
        "data": " ".join(words),
        "revision": record.revision or "-",
        "started": record.started,
    }


def distance_cells(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    """Return best and last value of each metric; runs of unequal lengths are also compared at the last common point."""
    found = {}
    for metric in dict.fromkeys(metric for run in runs for metric in run.curve.distances):
        title, own = TITLES.get(metric, metric), run.curve.distances.get(metric, [])
        found[title] = "-"
        if own:
            best, last = best_point(own, metric), own[-1]
            found[title] = f"{best[1]:.4g} at {best[0]:,}{'' if best == last else f', at the end {last[1]:.4g}'}"
        measured = [dict(other.curve.distances[metric]) for other in runs if metric in other.curve.distances]
        shared = set.intersection(*(set(points) for points in measured))
        if shared and len({max(points) for points in measured}) > 1:
            level = max(shared)
            found[f"{title} at {level:,} images"] = f"{dict(own)[level]:.4g}" if own else "-"
    return found


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


def trainings(folders: Sequence[str]) -> list[str]:
    """Omit folders of `validate` and `predict`, because `runs/NAME/*` matches them too; print a line for each."""
    folders = list(dict.fromkeys(folders))
    recorded = [folder for folder in folders if (Path(folder) / RECORD_NAME).is_file()]
    if not recorded:
        return folders  # Reading them reports what is missing.
    for folder in folders:
        if folder not in recorded:
            print(f"left out: {folder} has no {RECORD_NAME}, which every training writes", file=sys.stderr)
    return recorded


def main(args: Sequence[str] | None = None) -> None:
    """Print the report of the runs on the command line, and write it with its pictures."""
    about = "Put training runs side by side: distances, speed, data, versions, and the settings that differ. "
    about += "Runs that differ in k or n are also drawn as in Figure 4."
    parser = argparse.ArgumentParser(prog="lit-knn report", description=about)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a training run, such as runs/demo/knn_0")
    told = "path of the files; their names end in .md, .png and .pdf"
    parser.add_argument("--output", default="report", type=lambda path: path.removesuffix(".md"), help=told)
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier report")
    options = parser.parse_args(args)
    runs = [read_run(folder) for folder in trainings(options.runs)]
    curves = [run.curve for run in runs]
    pictures = {options.output: run_comparison}
    measured = [curve for curve in curves if curve.distances]
    if any(len({(run.k, run.n) for run in varied(measured, option)}) > 1 for option in ("k", "n")):
        pictures[f"{options.output}_figure4"] = figure4
    page = Path(f"{options.output}.md")
    written = [page, *(Path(f"{stem}.{suffix}") for stem in pictures for suffix in ("png", "pdf"))]
    text = markdown(runs)
    print(text)
    there = [path for path in written if path.exists()]
    # The page is written first, so files of a report that was interrupted have its page beside them.
    same = page in there and page.read_text(encoding="utf-8") == text
    if there and not same and not options.overwrite:
        raise InputError(f"report: {there[0]} is of another report, and stays; give another --output or --overwrite")
    with written_whole(page) as partial:
        partial.write_text(text, encoding="utf-8")
    for stem, draw in pictures.items():
        save_figure(draw(curves), stem)
    print(f"Written: {', '.join(map(str, written))}")
