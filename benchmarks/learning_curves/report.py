"""Tables and picture of the learning curves, from the rows alone."""

from collections.abc import Mapping

import numpy as np

from benchmarks.common import markdown
from benchmarks.learning_curves.claims import (
    CLOSED_FORM,
    POSTERIOR,
    Contrasts,
    contrasts,
    judge,
)
from benchmarks.learning_curves.grid import MODULES, Run, targets
from benchmarks.learning_curves.picture import picture, samples_picture
from benchmarks.learning_curves.statistics import Curves
from benchmarks.learning_curves.table import CurveTable
from benchmarks.learning_curves.titles import COMPARED, FINAL, INTERVALS, TIMES
from lit_knn.common.errors import InputError
from lit_knn.common.files import written_whole
from lit_knn.figures.style import save_figure


def report(table: CurveTable) -> str:
    """Write STEM.md and STEM.png beside the table, and return the text of the tables.

    Raises:
        InputError: the table has no rows, or rows of several sets.
    """
    rows = table.load()
    names = {str(row["set"]) for row in rows}
    if len(names) != 1:
        raise InputError(
            f"--report: {table.path} must have the rows of one set, it has {sorted(names) or 'none'}"
        )
    (name,) = names
    in_table = dict.fromkeys(str(row["module"]) for row in rows)
    # Variants come after the modules, in the order of their rows.
    modules = [module for module in dict.fromkeys((*MODULES, *in_table)) if module in in_table]
    curves = {
        m: Curves([row for row in rows if row["module"] == m], list(targets(name, m)))
        for m in modules
    }
    # Averages of other lengths, measured once, are no curves, and no trainings for claims.
    courses = {module: each for module, each in curves.items() if len(each.steps) > 1} or curves
    text = "\n\n".join(
        [_claims(courses), *(_of_module(module, own) for module, own in curves.items())]
    )
    for module, own in curves.items():
        files = {each: table.pictures(Run(name, module, each, 0)) for each in own.estimators}
        shown = {each: np.load(path) for each, path in files.items() if path.exists()}
        if shown:
            # A link in Markdown has no space.
            stem = f"{table.path.stem}_{module}".replace(" ", "_")
            save_figure(samples_picture(shown), table.path.with_name(stem))
    with written_whole(table.path.with_suffix(".md")) as partial:
        partial.write_text(f"{text}\n")
    save_figure(picture(courses), table.path.with_suffix(""))
    return text


def _claims(curves: Mapping[str, Curves]) -> str:
    lines = [["claim", "of", "module", "difference", "value", "verdict"]]
    comparisons = sum(len(judge(own)) for own in curves.values())
    for module, own in curves.items():
        for each in judge(own, comparisons):
            one, other = each.pair
            cells = [
                f"{one} − {other}",
                str(each.difference),
                f"{each.verdict} ({each.difference.seeds} seeds)",
            ]
            lines.append([each.claim, each.source, module, *cells])
    about = (
        "Claims, judged by paired differences over seeds of the Fréchet distance on features, or on pixels where "
        f"features are not measured. The t-intervals hold together with 95 % (Bonferroni's rule for {comparisons} "
        "comparisons; the best of several estimators counts as several). A claim holds, or does not hold, if its "
        "interval lies on one side of 0. Training and noise of the samples vary with the seed, so an interval covers "
        "both; the latents of the errors are the same for all."
    )
    if any(POSTERIOR in own.estimators for own in curves.values()):
        about += " A claim about noise is judged by the measure that it names."
    return (
        f"{about}\n\n{markdown(lines)}"
        if len(lines) > 1
        else f"{about} No pair has two common seeds yet."
    )


def _of_module(module: str, curves: Curves) -> str:
    images = int(curves.band(curves.estimators[0], "images")[0][-1])
    parts = [
        f"## {module}, {images:,} images",
        "Mean ± standard deviation over seeds, at the last step. Fréchet distances have the bias of few samples, which "
        "is nearly the same for all:",
        _final(curves),
    ]
    for hardware, own in curves.by_hardware().items():
        seconds = own.common_seconds()
        about = f"The processor's time of the training, and measures at an equal time, {seconds:.0f} s of {hardware}:"
        parts += [about, _equal_time(own, seconds)]
    parts += [
        f"Paired differences over seeds at the last step. {INTERVALS} Share: the part of the images after which the "
        "Fréchet distance is as low as the first estimator's at the end.",
        _differences(curves),
    ]

    if pooled := contrasts(curves.estimators):
        parts += [
            "Pooled over the pairs of target and tangent, at the last step: the mean of one group minus that of the "
            "other, paired over seeds. The tangents are those of one-sample targets. Each 95 % t-interval holds alone; "
            "bold if it excludes 0.",
            _pooled(curves, pooled),
        ]

    return "\n\n".join(parts)


def _final(curves: Curves) -> str:
    names = [name for name in FINAL if curves.measured(name)]
    lines = [["estimator", "seeds", *(FINAL[name] for name in names)]]
    for estimator in curves.estimators:
        cells = [curves.spread(estimator, curves.last(name)) for name in names]
        lines.append([estimator, str(len(curves.seeds(estimator))), *cells])
    return markdown(lines)


def _equal_time(curves: Curves, seconds: float) -> str:
    names = [name for name in COMPARED if curves.measured(name) and name != "recall"]
    lines = [["estimator", *TIMES.values(), *(FINAL[name] for name in names)]]
    for estimator in curves.estimators:
        values = [*map(curves.last, TIMES), *(curves.at_seconds(name, seconds) for name in names)]
        lines.append([estimator, *(curves.spread(estimator, value) for value in values)])
    return markdown(lines)


def _differences(curves: Curves) -> str:
    names = [name for name in COMPARED if curves.measured(name)]
    lines = [["difference", "seeds", *(FINAL[name] for name in names), "share"]]
    first, *others = curves.estimators
    pairs = [(each, first) for each in others]
    pairs += [
        (each, best) for best in CLOSED_FORM if best in others for each in others if each != best
    ]
    pairs = [pair for pair in pairs if curves.seeds(*pair)]
    if not pairs:
        return "No pair has a common seed yet."
    share = curves.images_to_reach(curves.quality, first)
    for one, other in pairs:
        seeds = len(curves.seeds(one, other))
        cells = [
            curves.difference(curves.last(name), one, other, len(pairs)).cell(seeds)
            for name in names
        ]
        share_text = curves.spread(one, share, "not reached") if other == first else ""
        lines.append([f"{one} − {other}", str(seeds), *cells, share_text])
    return markdown(lines)


def _pooled(curves: Curves, pooled: Contrasts) -> str:
    names = [name for name in COMPARED if curves.measured(name)]
    lines = [["contrast", *(FINAL[name] for name in names)]]

    for each in pooled:
        differences = [
            curves.contrast(curves.last(name), each.group, each.others) for name in names
        ]
        lines.append([" − ".join(each.names), *map(str, differences)])

    return markdown(lines)
