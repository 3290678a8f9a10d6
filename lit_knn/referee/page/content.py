"""The Markdown of a page: what was measured, the ranking, and all that stands behind it."""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from lit_knn.referee.cases import CASES
from lit_knn.referee.page import markdown
from lit_knn.referee.page.front import ROUNDING, Ranked
from lit_knn.referee.page.markdown import MISSING, Entries, at_levels, cell, error_ratio, escaped, ratio, table
from lit_knn.referee.page.results import Entry, Results

VERSIONS = ("lit_knn", "python", "torch", "numpy", "faiss")
RANKING = (
    "Front 1 holds the entries that no other beats in both mean time and worst error over the noise levels, front 2 "
    "those that only front 1 beats, and so on. The table is sorted by front, then by time. Time is the mean over t of "
    "the ratio to the reference estimator's in the same process, with the fastest and the slowest repeat. Worst error "
    f"is the largest error ratio over t; errors below {ROUNDING:g} per dimension are rounding and count as equal. The "
    "columns at t have the ratio of the mean squared errors, ± one standard error; bold: on the Pareto front of "
    "error against time at that t. A mean that cannot be told from 0 is a limit, as in < 1e-9."
)
CERTIFICATES = (
    "Some estimators state the squared error of each estimate. The table divides the stated by the actual error; below "
    "1, an estimator promises too much. The spread is the stated errors' standard deviation over the latents, divided "
    "by their mean."
)
USUAL = (
    "themselves for the same generator, draw from no other one, leave z and t as they were, do without the image that "
    "z was made from, and take batches of any size."
)
# Arguments of `object`, which a class without a constructor records.
NO_OPTIONS = ("args", "kwargs")
# The column, an answer, and what it says.
ANSWERS = (
    ("repeats_itself", "no", "the same generator does not give the same estimate"),
    ("needs_source", "yes", "needs the image that z was made from"),
    ("needs_source", "uses it", "uses the image that z was made from, if it is given"),
)


def page(all_results: Sequence[tuple[Results, Entries, str]]) -> str:
    """Return the Markdown of a page, from the results of each case, its ranked entries and its pictures' name."""
    cases = ", ".join(dict.fromkeys(results.case for results, *_ in all_results))
    parts = [f"# Estimators of the posterior mean: {escaped(cases)}"]
    for results, entries, picture in all_results:
        case = escaped(results.case)
        parts += [f"## {case}", _introduction(results), facts(results)]
        parts += ["### Ranking", escaped(RANKING), ranking(results, entries)]
        parts += [f"![Error against time, {case}]({picture}.png)"]
        if certified := [ranked for ranked in entries if ranked.entry.values("certified_share")]:
            parts += ["### Certified errors", CERTIFICATES, certificates(results, certified)]
        parts += [*behaviour(results, entries), *notes(results, entries), "### Commands"]
        parts.append("\n".join(["```", *(command(ranked.entry) for ranked in entries), "```"]))
    return "\n\n".join(parts) + "\n"


def _introduction(results: Results) -> str:
    case = CASES.get(results.case)
    settings = "the settings of the case" if case is None else f"k = {case.k} and n = {case.n}"
    return (
        "Every entry estimates E[x|z,t]: the mean of the images x of a data set, given a noisy image z = x + t·ε. "
        "Errors are distances to the exact mean. Ratios of error and time are to the reference estimator, KNN with "
        f"{settings}."
    )


def facts(results: Results) -> str:
    """List what was measured, how, where and when."""

    def each(column: str) -> str:
        return ", ".join(results.distinct(column))

    case, dates = results.facts, [date[:10] for date in results.distinct("date")]
    items = {
        "Data:": f"N = {int(case['N']):,}, d = {int(case['d']):,}, fingerprint {case['data']}",
        "Noise levels:": f"t = {', '.join(f'{t:g}' for t in results.levels)}",
        "Protocol": f"{each('protocol')}: {each('latents')} latents at each t, {each('repeats')} estimates of each, in "
        f"batches of {each('batch')}",
    }
    for machine in results.machines:
        cpu, cores, memory, threads = machine
        text = f"{cpu}, {cores} cores, {memory} GB, threads used: {threads}"
        own = [entry for entry in results.entries if entry.machine == machine]
        ms = [value for entry in own for value in entry.values("reference_ms")]
        text += f"; the reference estimator takes {ratio(min(ms))} to {ratio(max(ms))} ms per z"
        items[f"Machine {results.letter(machine)}:" if len(results.machines) > 1 else "Machine:"] = text
    items["Versions:"] = "; ".join(f"{name} {each(name)}" for name in VERSIONS if results.distinct(name))
    items["Measured:"] = " to ".join(sorted({min(dates), max(dates)}))
    if len(results.machines) > 1:
        items["Several machines:"] = "compare ratios; set-up, memory and ms are those of an entry's own machine"
    return "\n".join(f"- **{name}** {escaped(text)}" for name, text in items.items())


def ranking(results: Results, entries: Entries) -> str:
    """Write the main table: front, times, memory, and the error ratio at each noise level."""

    def amount(value: float, unit: str) -> str:
        digits = 1 if unit == "s" and value < 10 else 0
        return MISSING if math.isnan(value) else f"{value:,.{digits}f} {unit}"

    columns: dict[str, Callable[[Ranked], str]] = {
        "front": lambda r: cell(str(r.place or MISSING), strong=r.place == 1),
        "time": lambda r: markdown.spread(r.time, r.entry.mean("time_ratio_low"), r.entry.mean("time_ratio_high")),
        "ms per z": lambda r: ratio(r.entry.mean("ms")),
        "worst error": lambda r: ratio(r.error),
        "set-up": lambda r: amount(r.entry.mean("setup_seconds"), "s"),
        "memory": lambda r: amount(r.entry.mean("peak_mib"), "MiB"),
    }
    return table(results, entries, columns | at_levels(results, error_ratio))


def certificates(results: Results, entries: Entries) -> str:
    """Write the table of certified over actual error."""

    def at(r: Ranked, t: float) -> str:
        share, spread = r.entry.value(t, "certified_share"), r.entry.value(t, "certified_spread")
        small = "" if math.isnan(spread) else f"spread {ratio(spread)}"
        return "rounding" if r.entry.value(t, "mse") < ROUNDING else cell(ratio(share), small)

    return table(results, entries, at_levels(results, at))


def unusual(entry: Entry) -> list[str]:
    """List what is unusual about an entry, in words; empty if nothing is."""
    facts = entry.facts
    said = [words for column, answer, words in ANSWERS if facts[column] == answer]
    if (gap := float(facts["batch_gap"] or 0)) > ROUNDING:
        said.append(f"batches of one latent and of {facts['batch']} differ by an MSE of {markdown.error(gap)}")
    return said


def behaviour(results: Results, entries: Entries) -> list[str]:
    """Return the section on what is unusual about the entries."""
    strange = [ranked for ranked in entries if unusual(ranked.entry)]
    columns = {"what is unusual": lambda r: escaped("; ".join(unusual(r.entry)))}
    parts = [table(results, strange, columns)] if strange else []
    if len(strange) < len(entries):
        parts.append(f"{'The others repeat' if strange else 'All repeat'} {USUAL}")
    return ["### Behaviour", *parts]


def notes(results: Results, entries: Entries) -> list[str]:
    """Return the section on what entries compute, of those that say it."""
    noted = [ranked for ranked in entries if ranked.entry.facts["note"]]
    columns = {"what it computes": lambda r: escaped(r.entry.facts["note"])}
    return ["### What they compute", table(results, noted, columns)] if noted else []


def command(entry: Entry) -> str:
    """Return the command, with PATH for the data."""
    facts = entry.facts
    settings = json.loads(
        facts["settings"], object_pairs_hook=lambda pairs: dict(p for p in pairs if p[0] not in NO_OPTIONS)
    )
    words = ["lit-knn", "referee", "run", "--case", facts["case"], *_options("--estimator", settings)]
    words += _options("--index", settings["index"]) if "index" in settings else []
    words += [word for name in ("batch", "repeats", "threads") for word in (f"--{name}", facts[name])]
    case = CASES.get(facts["case"])
    if case is not None and int(facts["latents"]) < case.latents:
        words += ["--latents", facts["latents"]]
    if case is not None and case.recipe is not None:
        words += ["--data", "PATH"]
    return shlex.join([*words, "--name", entry.name])


def _options(option: str, part: dict[str, Any]) -> list[str]:
    words = [option, part["class_path"]]
    for name, value in part.get("init_args", {}).items():
        words += [f"{option}.{name}", value if isinstance(value, str) else json.dumps(value)]
    return words
