"""The Markdown of a page: what was measured, the ranking, and all that stands behind it."""

import math
from collections.abc import Callable, Mapping, Sequence

from lit_knn.referee.page.behaviour import unusual
from lit_knn.referee.page.command import command
from lit_knn.referee.page.front import ROUNDING, Ranked
from lit_knn.referee.page.markdown import MISSING, cell, error, escaped, fenced, ratio, upper_limit
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
    "bias_sq": "Squared bias, corrected for the number of estimates; the rest of the error is variance",
}
# A mean is told from 0 by one standard error, a square that may be negative by two.
SURE = {"bias_sq": 2.0}
# These columns hold text. The others hold numbers, which are set to the right.
TEXTS = ("estimator", "what is unusual", "what it computes")
Entries = Sequence[Ranked]


def page(all_results: Sequence[tuple[Results, Entries, str]]) -> str:
    """Return the Markdown of a page, from the results of each case, its ranked entries and its pictures' name."""
    cases = ", ".join(dict.fromkeys(results.case for results, *_ in all_results))
    parts = [f"# Estimators of the posterior mean: {escaped(cases)}"]
    for results, entries, picture in all_results:
        case = escaped(results.case)
        parts += [f"## {case}", facts(results), "### Ranking", escaped(RANKING), ranking(results, entries)]
        parts += [f"![Error against time, {case}]({picture}.png)"]
        parts += [f"![Error ratio over t, {case}]({picture}_over_t.png)"]
        for column, title in ERRORS.items():
            parts += [f"### {title}", means(results, entries, column)]
        if certified := [ranked for ranked in entries if ranked.entry.values("certified_share")]:
            parts += ["### Certified errors", CERTIFICATES, certificates(results, certified)]
        parts += [*behaviour(results, entries), *notes(results, entries), *commands(entries)]
    return "\n\n".join(parts) + "\n"


def facts(results: Results) -> str:
    """List what was measured, how, where and when."""

    def each(column: str) -> str:
        return ", ".join(results.distinct(column)) or "unknown"

    case, dates = results.facts, [date[:10] for date in results.distinct("date")]
    items = {
        "Data:": f"N = {_commas(case['N'])}, d = {_commas(case['d'])}, fingerprint {case['data']}",
        "Noise levels:": f"t = {', '.join(f'{t:g}' for t in results.levels)}",
        "Protocol": f"{each('protocol')}: {each('latents')} latents at each t, {each('repeats')} estimates of each, in "
        f"batches of {each('batch')}",
    }
    if known := [value for entry in results.entries for value in entry.values("exact_error")]:
        items["Exact means:"] = f"known to a mean squared error of {error(max(known))} or less"
    items |= _machines(results)
    items["Versions:"] = "; ".join(f"{name} {each(name)}" for name in VERSIONS if results.distinct(name))
    items["Measured:"] = " to ".join(sorted({min(dates), max(dates)})) if dates else "no date"
    if len(results.machines) > 1:
        items["Several machines:"] = "compare ratios; set-up, memory and ms are those of an entry's own machine"
    if results.older:
        items["Left out:"] = f"{results.older} rows that were measured again later"
    return "\n".join(f"- **{name}** {escaped(text)}" for name, text in items.items())


def _machines(results: Results) -> dict[str, str]:
    items = {}
    for machine in results.machines:
        cpu, cores, memory, threads = machine
        text = f"{cpu or 'unknown CPU'}, {cores} cores, {memory} GB, threads used: {threads}"
        own = [entry for entry in results.entries if entry.machine == machine]
        if ms := [value for entry in own for value in entry.values("reference_ms")]:
            text += f"; the reference estimator takes {ratio(min(ms))} to {ratio(max(ms))} ms per z"
        items[f"Machine {letter(results, machine)}:" if len(results.machines) > 1 else "Machine:"] = text
    return items


def letter(results: Results, machine: tuple[str, ...]) -> str:
    """Name a machine on this page: A, B, and so on, and by numbers after Z."""
    place = results.machines.index(machine)
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def ranking(results: Results, entries: Entries) -> str:
    """Write the main table: front, times, memory, and the error ratio at each noise level."""

    def seconds(value: float) -> str:
        return MISSING if math.isnan(value) else f"{value:.{0 if value >= 10 else 1}f} s"

    def mib(value: float) -> str:
        return MISSING if math.isnan(value) else f"{value:,.0f} MiB"

    columns: dict[str, Callable[[Ranked], str]] = {
        "front": lambda r: cell(str(r.place or MISSING), strong=r.place == 1),
        "time": lambda r: spread(r.time, r.entry.mean("time_ratio_low"), r.entry.mean("time_ratio_high")),
        "ms per z": lambda r: ratio(r.entry.mean("ms")),
        "worst error": lambda r: ratio(r.error),
        "set-up": lambda r: seconds(r.entry.mean("setup_seconds")),
        "memory": lambda r: mib(r.entry.mean("peak_mib")),
    }
    return table(results, entries, columns | at_levels(results, lambda r, t: mean(r, t, "mse_ratio", ratio)))


def means(results: Results, entries: Entries, column: str) -> str:
    """Write a table of a mean with its standard error, such as `mse`, at each noise level."""
    return table(results, entries, at_levels(results, lambda r, t: mean(r, t, column)))


def certificates(results: Results, entries: Entries) -> str:
    """Write the table of certified over actual error."""

    def at(r: Ranked, t: float) -> str:
        if r.entry.value(t, "mse") < ROUNDING:
            return "rounding"
        spread = r.entry.value(t, "certified_spread")
        return cell(ratio(r.entry.value(t, "certified_share")), "" if math.isnan(spread) else f"spread {ratio(spread)}")

    return table(results, entries, at_levels(results, at))


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


def commands(entries: Entries) -> list[str]:
    """Return the section of the commands that measure each entry again, with all its settings."""
    parts = ["### Commands"]
    for ranked in entries:
        own = ranked.entry.facts
        when, revision = own["date"][:10] or "unknown date", own["lit_knn"] or "unknown revision"
        parts.append(escaped(f"{ranked.number} {ranked.entry.name} ({when}, lit_knn {revision}):"))
        parts.append(fenced(command(ranked.entry) or own["settings"]))
    return parts


def table(results: Results, entries: Entries, columns: Mapping[str, Callable[[Ranked], str]]) -> str:
    """Write a table with a row for each entry; `columns` has the function that writes the cells of each column."""
    header = ["#", "estimator", *columns]
    rule = ["---" if column in TEXTS else "---:" for column in header]
    rows = [[str(r.number), name(results, r), *(write(r) for write in columns.values())] for r in entries]
    return "\n".join(f"| {' | '.join(row)} |" for row in (map(escaped, header), rule, *rows))


def at_levels(results: Results, write: Callable[[Ranked, float], str]) -> dict[str, Callable[[Ranked], str]]:
    """Return a column for each noise level, whose cells `write` writes."""
    return {f"t = {t:g}": lambda r, t=t: write(r, t) for t in results.levels}  # type: ignore[misc]


def name(results: Results, ranked: Ranked) -> str:
    """Write the cell of an entry's name, with origin and machine where they matter."""
    origin = ranked.entry.facts["origin"]
    machine = f"machine {letter(results, ranked.entry.machine)}" if len(results.machines) > 1 else ""
    return cell(ranked.entry.name, ", ".join(part for part in (origin, machine) if part not in ("", "lit_knn")))


def mean(ranked: Ranked, t: float, column: str, form: Callable[[float], str] = error) -> str:
    """Write the cell of a mean with its standard error, or of its upper limit if it cannot be told from 0."""
    value, standard_error = ranked.entry.value(t, column), ranked.entry.value(t, f"{column}_se")
    if math.isnan(value):
        return MISSING
    # Only the ratio of the ranking shows who is on the front.
    strong = column == "mse_ratio" and t in ranked.front
    limit = upper_limit(value, standard_error, SURE.get(column, 1.0))
    if limit is not None:
        return cell(f"< {form(limit)}", strong=strong)
    return cell(form(value), f"± {form(standard_error)}" if standard_error > 0 else "", strong)


def spread(value: float, low: float, high: float) -> str:
    """Write the cell of a time ratio with its range over the repeats."""
    known = not (math.isnan(low) or math.isnan(high))
    return cell(ratio(value), f"{ratio(low)} to {ratio(high)}" if known else "")


def _commas(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else text
