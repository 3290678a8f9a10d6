"""The content of a page: what was measured, the ranking, and all that stands behind it."""

from collections.abc import Sequence

from lit_knn.referee.page import numbers, tables
from lit_knn.referee.page.behaviour import unusual
from lit_knn.referee.page.command import command
from lit_knn.referee.page.front import ROUNDING, Ranked
from lit_knn.referee.page.markdown import cell, escaped, fenced, table
from lit_knn.referee.page.results import Results

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
    "Some estimators state the squared error of each estimate. The table has the stated over the actual error: 1 is "
    "honest, less promises too much. The spread is the standard deviation of the stated errors over the latents, of "
    "their mean."
)
USUAL = (
    "themselves for the same generator, draw from no other one, leave z and t as they were, do without the image that "
    "z was made from, and take batches of any size, a very small t and float16."
)
ERRORS = {
    "mse": "Mean squared error per dimension",
    "bias_sq": "Squared bias, corrected for the number of estimates",
    "variance": "Variance",
    "score_mse": "Mean squared error of the score",
}


def page(all_results: Sequence[tuple[Results, Sequence[Ranked], str]]) -> str:
    """Return the Markdown of a page, from the results of each case, its ranked entries and its pictures' name."""
    cases = ", ".join(dict.fromkeys(results.case for results, *_ in all_results))
    parts = [f"# Estimators of the posterior mean: {escaped(cases)}"]
    for results, entries, picture in all_results:
        case = escaped(results.case)
        parts += [f"## {case}", measured(results), "### Ranking", escaped(RANKING), tables.ranking(results, entries)]
        parts += [
            f"![Error against time, {case}]({picture}.png)",
            f"![Error ratio over t, {case}]({picture}_over_t.png)",
        ]
        parts += ["### Errors and times"]
        for column, name in ERRORS.items():
            parts += [f"#### {name}", tables.error_table(results, entries, column)]
        parts += ["#### Time at each noise level", tables.time_table(results, entries)]
        if certificates := tables.certificate_table(results, entries):
            parts += ["### Certified errors", CERTIFICATES, certificates]
        parts += [*behaviour(results, entries), *notes(results, entries), *commands(entries)]
    return "\n\n".join(parts) + "\n"


def measured(results: Results) -> str:
    """List what was measured, how, where and when."""

    def each(column: str) -> str:
        return ", ".join(results.distinct(column)) or "unknown"

    facts, dates = results.facts, [date[:10] for date in results.distinct("date")]
    known = results.values("exact_error")
    items = {
        "Data:": f"N = {_commas(facts['N'])}, d = {_commas(facts['d'])}, fingerprint {facts['data']}",
        "Noise levels:": f"t = {', '.join(f'{t:g}' for t in results.levels)}",
        "Protocol": f"{each('protocol')}: {each('latents')} latents at each t, {each('repeats')} estimates of each, in "
        f"batches of {each('batch')}",
    }
    if known:
        items["Exact means:"] = f"known to a mean squared error of {numbers.error(max(known))} or less"
    items |= _machines(results)
    items["Versions:"] = "; ".join(f"{name} {each(name)}" for name in VERSIONS if results.distinct(name))
    items["Measured:"] = " to ".join(sorted({min(dates), max(dates)})) if dates else "no date"
    if len(results.machines) > 1:
        items["Several machines:"] = "compare ratios; set-up, memory and ms are those of an entry's own machine"
    if results.older:
        items["Left out:"] = f"{results.older} rows that were measured again later"
    return "\n".join(f"- **{name}** {escaped(text)}" for name, text in items.items())


def behaviour(results: Results, entries: Sequence[Ranked]) -> list[str]:
    """Return the section on what is unusual about the entries."""
    found = [(ranked, words) for ranked in entries if (words := unusual(ranked.entry))]
    rows = [[*tables.names(results, ranked), cell("; ".join(words))] for ranked, words in found]
    parts = [table(["#", "estimator", "what is unusual"], rows)] if found else []
    if len(found) < len(entries):
        parts.append(f"{'The others repeat' if found else 'All repeat'} {USUAL}")
    return ["### Behaviour", *parts]


def notes(results: Results, entries: Sequence[Ranked]) -> list[str]:
    """Return the section on what entries compute, of those that say it."""
    rows = [[*tables.names(results, r), cell(r.entry.facts["note"])] for r in entries if r.entry.facts["note"]]
    return ["### What they compute", table(["#", "estimator", "what it computes"], rows)] if rows else []


def commands(entries: Sequence[Ranked]) -> list[str]:
    """Return the section of the commands that measure each entry again, with all its settings."""
    parts = ["### Commands"]
    for ranked in entries:
        facts = ranked.entry.facts
        when, revision = facts["date"][:10] or "unknown date", facts["lit_knn"] or "unknown revision"
        parts.append(escaped(f"{ranked.number} {ranked.entry.name} ({when}, lit_knn {revision}):"))
        parts.append(fenced(command(ranked.entry) or facts["settings"]))
    return parts


def _machines(results: Results) -> dict[str, str]:
    items = {}
    for machine in results.machines:
        own = [entry for entry in results.entries if entry.machine == machine]
        cpu, cores, memory, threads = machine
        text = f"{cpu or 'unknown CPU'}, {cores} cores, {memory} GB, threads used: {threads}"
        if times := [ms for entry in own for ms in entry.values("reference_ms")]:
            least, most = numbers.ratio(min(times)), numbers.ratio(max(times))
            text += f"; the reference estimator takes {least} to {most} ms per z"
        items[f"Machine {tables.letter(results, own[0])}:" if len(results.machines) > 1 else "Machine:"] = text
    return items


def _commas(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else text
