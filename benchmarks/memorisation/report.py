"""Tables and picture of the runs, from the rows alone."""

import math
from collections.abc import Callable, Sequence

from benchmarks.common import markdown
from benchmarks.memorisation.picture import Runs, picture
from benchmarks.memorisation.table import MemorisationTable
from benchmarks.memorisation.times import COPIED_LEVELS, SLACK, generation_time, growth, memorisation_time
from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError
from lit_knn.figures.save import save_figure
from lit_knn.results import Row

TIMES: dict[str, Callable[[Sequence[Row]], float]] = {
    **{f"tau_mem ({level:.0%})": lambda rows, level=level: memorisation_time(rows, level) for level in COPIED_LEVELS},
    "tau_gen": generation_time,
}


def report(table: MemorisationTable) -> str:
    """Write STEM.md and STEM.png beside the table, and return the text of the tables.

    Raises:
        InputError: the table has no rows.
    """
    runs = table.runs()
    if not runs:
        raise InputError(f"--report: {table.path} has no rows")
    levels = " and ".join(f"{level:.0%}" for level in COPIED_LEVELS)
    parts = [
        f"tau_mem is the step at which {levels} of the samples are copies (interpolated in the logarithm of the step), "
        f"tau_gen the step at which `fd_pixels` on held-out digits comes within {SLACK:.0%} of the run's least. The "
        "time of a run that has not come so far is above its last step.",
        _runs(runs),
        "Exponents of N with 95 % t-intervals, from all runs whose N has no unfinished time:",
        _exponents(runs),
    ]
    text = "\n\n".join(parts)
    with written_whole(table.path.with_suffix(".md")) as partial:
        partial.write_text(f"{text}\n")
    save_figure(picture(runs), table.path.with_suffix(""))
    return text


def _runs(runs: Runs) -> str:
    lines = [
        [
            "estimator",
            "N",
            "seed",
            *TIMES,
            "tau_mem / N",
            "least fd_pixels",
            "at the end: copied",
            "fd_pixels",
            "training error",
            "held-out error",
            "error to the exact mean",
            "last step",
        ]
    ]
    for run, rows in sorted(runs.items()):
        last, times = rows[-1], [time(rows) for time in TIMES.values()]
        cells = [*map(str, run), *(_told(time, last) for time in times), _told(times[0], last, run.N)]
        cells += [f"{min(float(row['fd_pixels']) for row in rows):.3f}", f"{float(last['copied_fraction']):.1%}"]
        cells += [f"{float(last[name]):.3f}" for name in ("fd_pixels", "train_error", "held_error", "exact_error")]
        lines.append([*cells, str(last["step"])])
    return markdown(lines)


def _told(time: float, last: Row, unit: int = 1) -> str:
    return f"> {int(last['step']) / unit:.4g}" if math.isnan(time) else f"{time / unit:.4g}"


def _exponents(runs: Runs) -> str:
    lines = [["estimator", *TIMES]]
    for estimator in dict.fromkeys(run.estimator for run in runs):
        own = {run: rows for run, rows in runs.items() if run.estimator == estimator}
        slopes = [growth(own, time) for time in TIMES.values()]
        cells = ["" if s is None else f"{s.exponent:.2f} ± {s.half_width:.2f} ({s.points} runs)" for s in slopes]
        lines.append([estimator, *cells])
    return markdown(lines)
