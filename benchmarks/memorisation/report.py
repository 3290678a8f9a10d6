"""Tables and picture of the runs, from the rows alone."""

import math

from benchmarks.common import markdown
from benchmarks.learning_curves.statistics import CONFIDENCE
from benchmarks.memorisation.picture import Runs, picture
from benchmarks.memorisation.runs import ESTIMATORS
from benchmarks.memorisation.table import MemorisationTable
from benchmarks.memorisation.times import COPIED_LEVELS, SLACK, TIMES, Slope, growth, ratio
from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.common.tables import Row
from lit_knn.figures.save import save_figure

LEAST = {"fd_pixels": "least fd_pixels", "held_error": "least held-out error"}
LAST = {
    "step": "step",
    "copied_fraction": "copied fraction",
    "train_error": "training error",
    "held_error": "held-out error",
    "exact_error": "error to the exact mean",
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
        f"tau_mem is the step at which {levels} of the samples are copies; tau_gen the step at which `fd_pixels` on "
        f"held-out digits, or the denoising error there, comes within {SLACK:.0%} of the run's least; "
        f"tau_over the step at which that error is {SLACK:.0%} above its least again. All are interpolated "
        "in the logarithm of the step. A time that a run has not reached is above its last step; tau_gen is known when "
        "tau_over is.",
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
    lines = [["estimator", "N", "seed", *TIMES, *LEAST.values(), *(f"{name} at the end" for name in LAST.values())]]
    for run, rows in sorted(runs.items()):
        cells = [_told(name, time(rows), rows[-1]) for name, time in TIMES.items()]
        cells += [f"{min(float(row[name]) for row in rows):.3f}" for name in LEAST]
        lines.append([*map(str, run), *cells, *(f"{float(rows[-1][name]):.4g}" for name in LAST)])
    return markdown(lines)


def _told(name: str, time: float, last: Row) -> str:
    if not math.isnan(time):
        return f"{time:.0f}"
    return "not known" if name.startswith("tau_gen") else f"> {last['step']}"


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
