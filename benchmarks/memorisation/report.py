"""Tables and picture of the runs, from the rows alone."""

import math

from benchmarks.common import markdown
from benchmarks.learning_curves.statistics import CONFIDENCE
from benchmarks.memorisation.picture import Runs, picture
from benchmarks.memorisation.runs import ESTIMATORS
from benchmarks.memorisation.table import MemorisationTable
from benchmarks.memorisation.times import COPIED_LEVELS, SLACK, TIMES, Slope, growth, ratio
from lit_knn.atomic_files import written_whole
from lit_knn.errors import InputError
from lit_knn.figures.save import save_figure
from lit_knn.results import Row


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
        f"tau_mem is the step at which {levels} of the samples are copies; tau_gen the step at which `fd_pixels` on "
        f"held-out digits, or the denoising error there, comes within {SLACK:.0%} of the run's least; "
        f"tau_over the step at which that error is {SLACK:.0%} above its least again. All are interpolated "
        "in the logarithm of the step. The time of a run that has not come so far is above its last step.",
        _runs(runs),
        f"Exponents of N with {CONFIDENCE:.0%} t-intervals, from the runs of every N whose runs have all come so far:",
        _exponents(runs),
    ]
    if (ratios := _ratios(runs)) is not None:
        about = f"Geometric means over pairs of runs with the same N and seed, with {CONFIDENCE:.0%} t-intervals:"
        parts += [about, ratios]
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


def _ratios(runs: Runs) -> str | None:
    """Compare the last estimator with the first, None if no pair of runs has both."""
    first, *_, last = ESTIMATORS
    lines = [["time", f"{last} / {first}", "pairs"]]
    for name, time in TIMES.items():
        found = ratio(runs, time, last, first)
        if found.seeds:
            ends = [math.exp(found.mean + sign * found.half_width) for sign in (-1, 1)] if found.seeds > 1 else []
            told = f"{math.exp(found.mean):.2f}" + (" ({:.2f} to {:.2f})".format(*ends) if ends else "")
            lines.append([name, told, str(found.seeds)])
    return markdown(lines) if len(lines) > 1 else None


def _exponents(runs: Runs) -> str:
    lines = [["estimator", *TIMES]]
    for estimator in dict.fromkeys(run.estimator for run in runs):
        own = {run: rows for run, rows in runs.items() if run.estimator == estimator}
        slopes = [growth(own, time) for time in TIMES.values()]
        cells = [_exponent(slope) for slope in slopes]
        lines.append([estimator, *cells])
    return markdown(lines)


def _exponent(slope: Slope | None) -> str:
    if slope is None:
        return ""
    interval = "" if math.isinf(slope.half_width) else f" ± {slope.half_width:.2f}"
    return f"{slope.exponent:.2f}{interval} ({slope.points} runs)"
