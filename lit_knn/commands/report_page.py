"""The page of `lit-knn report` in Markdown: runs side by side, and the settings that differ."""

from collections.abc import Mapping, Sequence

from lit_knn.commands.report_runs import Run
from lit_knn.common.tables import TITLES
from lit_knn.figures.training_curves import best_point, metrics_of
from lit_knn.runs.record import images_without_mirrored


def markdown(runs: Sequence[Run]) -> str:
    """Return the report as Markdown; times are relative to the first one-sample run, or else to the first run."""
    baseline = runs[0]
    for run in reversed(runs):
        if run.curve.estimator == "OneSample":
            baseline = run

    columns = [cells(run, runs, baseline) for run in runs]
    results = []
    for label in columns[0]:
        row = [label]
        row += [column[label] for column in columns]
        results.append(row)

    lines = ["# Training runs", ""]
    lines += table(results)
    lines.append("")
    lines.append(
        f"Time per image is relative to {baseline.folder} ({baseline.curve.method}), without validations."
    )
    if len(runs) > 1:
        lines.append(
            "Trainings of other seeds show how much of a difference between the distances is chance."
        )

    lines += ["", "## Settings that differ", ""]
    rows = differences(runs)
    if rows:
        header = ["setting"]
        header += [run.folder for run in runs]
        lines += table([header, *rows])
    else:
        lines.append("None.")
    return "\n".join(lines) + "\n"


def cells(run: Run, runs: Sequence[Run], baseline: Run) -> dict[str, str]:
    """Return the column of a run in the first table, by row label.

    Args:
        run: the run of the column.
        runs: all runs, because the table has a row for each metric of any run.
        baseline: the run that times are compared with.
    """
    record = run.record
    time = record.time
    speed = "-"
    share = "-"
    if time.seconds:
        speed = f"{time.images_per_second:.4g}"
        share = f"{time.estimator_share:.1%}"

    return {
        "run": run.folder,
        "estimator": run.curve.method,
        "seed": str(run.config.get("seed_everything", "-")),
        "status": record.status,
        "steps": f"{record.step:,}",
        "images seen": f"{record.images_seen:,}",
        **distance_cells(run, runs),
        "hours of training": f"{time.seconds / 3600:.3g}",
        "images/s": speed,
        "estimator's share": share,
        "time per image": _relative_time(run, baseline),
        "memory, GPU": f"{record.memory_gb:.2f} GB, {record.gpu_memory_gb:.2f} GB",
        "hardware": "; ".join(time.hardware) or "-",
        "data": _data_cell(run),
        "revision": record.revision or "-",
        "started": record.started,
    }


def _relative_time(run: Run, baseline: Run) -> str:
    """Return the run's time per image as a share of the baseline's; "-" if one of them is not known."""
    speed = run.record.time.images_per_second
    speed_of_baseline = baseline.record.time.images_per_second
    if speed > 0 and speed_of_baseline > 0:
        return f"{speed_of_baseline / speed:.1%}"
    return "-"


def _data_cell(run: Run) -> str:
    """Return words on the data of a run: class, number and shape of images, and the beginning of their hash."""
    data = run.record.data
    text = str(data.get("class", "-"))
    if "images" not in data:
        return text

    shape = "x".join(str(size) for size in data["shape"])
    number = f"{images_without_mirrored(data):,} x {shape}"
    if data["hflip"]:
        number += " and their mirror images"
    # Eight digits of the hash are enough to distinguish data sets.
    return f"{text} {number} ({data['fingerprint'][:8]})"


def distance_cells(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    """Return the cells of a run for each metric: its best and last value, and its value at the last common point.

    The last common point is left out if all runs end at the same number of images.

    Args:
        run: the run.
        runs: all runs.
    """
    result = {}
    for metric in metrics_of([each.curve for each in runs]):
        title = TITLES.get(metric, metric)
        points = run.curve.distances.get(metric, [])
        result[title] = "-"
        if points:
            best, last = best_point(points, metric), points[-1]
            result[title] = f"{best[1]:.4g} at {best[0]:,}"
            if best != last:
                result[title] += f", at the end {last[1]:.4g}"

        images = last_common_point(metric, runs)
        if images is not None:
            label = f"{title} at {images:,} images"
            values = dict(points)
            result[label] = f"{values[images]:.4g}" if images in values else "-"
    return result


def last_common_point(metric: str, runs: Sequence[Run]) -> int | None:
    """Return the largest number of images at which all runs that have this metric measured it.

    It is None if there is no such number, or if all these runs end at the same number.
    """
    measured = []
    for run in runs:
        if metric in run.curve.distances:
            measured.append({images for images, _ in run.curve.distances[metric]})

    shared = set.intersection(*measured)
    ends = {max(images) for images in measured}
    if not shared or len(ends) == 1:
        return None
    return max(shared)


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Return table rows of what differs between the runs: settings, then versions and number of processes."""
    configs: list[Mapping[str, object]] = []
    versions: list[Mapping[str, object]] = []
    for run in runs:
        configs.append(run.config)
        record = run.record
        installed = {"python": record.python, "processes": record.processes}
        versions.append(installed | record.packages)
    return differing_rows(configs) + differing_rows(versions)


def differing_rows(columns: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return a row with a name and its values for each name whose values differ between the columns.

    Args:
        columns: the values of each column by name.
    """
    names: dict[str, None] = {}
    for column in columns:
        names.update(dict.fromkeys(column))

    rows = []
    for name in names:
        values = [str(column.get(name, "-")) for column in columns]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first row is the header."""
    lines = []
    for row in rows:
        # A cell must be one line, and a `|` in it would end the cell.
        escaped = [" ".join(cell.split()).replace("|", "\\|") for cell in row]
        lines.append("| " + " | ".join(escaped) + " |")

    lines.insert(1, "|" + "---|" * len(rows[0]))
    return lines
