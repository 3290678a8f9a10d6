"""The content of a page: what was measured, the ranking, and all that stands behind it."""

import json
from collections.abc import Sequence

from lit_knn.referee.page import numbers, tables
from lit_knn.referee.page.behaviour import unusual
from lit_knn.referee.page.blocks import Block, Cell, Code, Details, Heading, Items, Paragraph, Picture, Table
from lit_knn.referee.page.command import command
from lit_knn.referee.page.front import ROUNDING, Ranked
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


def title(all_results: Sequence[Results]) -> Heading:
    """Return the title of the page."""
    return Heading(1, f"Estimators of the posterior mean: {', '.join(dict.fromkeys(r.case for r in all_results))}")


def section(results: Results, entries: Sequence[Ranked], pictures: Sequence[Picture]) -> list[Block]:
    """Return the section of one case. `pictures` are error against time, and the error ratio over t."""
    against_time, over_t = pictures
    return [
        Heading(2, results.case),
        measured(results),
        Heading(3, "Ranking"),
        Paragraph(RANKING),
        tables.ranking(results, entries),
        against_time,
        over_t,
        *errors(results, entries),
        *certificates(results, entries),
        *behaviour(results, entries),
        *notes(results, entries),
        *settings(results, entries),
    ]


def measured(results: Results) -> Items:
    """List what was measured, how, where and when."""
    facts = results.facts
    dates = [date[:10] for date in results.distinct("date")]
    known = [
        value for entry in results.entries for t in entry.rows if (value := entry.value(t, "exact_error")) == value
    ]
    items = [
        ("Data:", f"N = {_commas(facts['N'])}, d = {_commas(facts['d'])}, fingerprint {facts['data']}"),
        ("Noise levels:", f"t = {', '.join(map(numbers.level, results.levels))}"),
        (
            "Protocol",
            f"{_all(results, 'protocol')}: {_all(results, 'latents')} latents at each t, {_all(results, 'repeats')} "
            f"estimates of each, in batches of {_all(results, 'batch')}",
        ),
        *([("Exact means:", f"known to a mean squared error of {numbers.error(max(known))} or less")] if known else []),
        *((_machine_name(results, place), _machine(results, key)) for place, key in enumerate(results.machines)),
        ("Versions:", "; ".join(f"{name} {_all(results, name)}" for name in VERSIONS if results.distinct(name))),
        ("Measured:", dates[0] if len(set(dates)) == 1 else f"{min(dates)} to {max(dates)}" if dates else "no date"),
    ]
    if len(results.machines) > 1:
        items.append(("Several machines:", "compare ratios; set-up, memory and ms are those of an entry's own machine"))
    if results.older:
        items.append(("Left out:", f"{results.older} rows that were measured again later"))
    return Items(items)


def errors(results: Results, entries: Sequence[Ranked]) -> list[Block]:
    """Return the tables of errors and times, each to be opened."""
    parts: list[tuple[str, Table]] = [
        ("Mean squared error per dimension", tables.error_table(results, entries, "mse")),
        ("Squared bias, corrected for the number of estimates", tables.error_table(results, entries, "bias_sq")),
        ("Variance", tables.error_table(results, entries, "variance")),
        ("Mean squared error of the score", tables.error_table(results, entries, "score_mse")),
        ("Time at each noise level", tables.time_table(results, entries)),
    ]
    return [Heading(3, "Errors and times"), *(Details(name, [table]) for name, table in parts)]


def certificates(results: Results, entries: Sequence[Ranked]) -> list[Block]:
    """Return the section on certificates, if an entry certifies its error."""
    table = tables.certificate_table(results, entries)
    said = (
        "Some estimators state the squared error of each estimate. The table has the stated over the actual error: "
        "1 is honest, less promises too much. The spread is the standard deviation of the stated errors over the "
        "latents, of their mean."
    )
    return [Heading(3, "Certified errors"), Paragraph(said), table] if table else []


def behaviour(results: Results, entries: Sequence[Ranked]) -> list[Block]:
    """Return the section on what is unusual about the entries."""
    found = [(ranked, words) for ranked in entries if (words := unusual(ranked.entry))]
    usual = (
        f"{'The others repeat' if found else 'All repeat'} themselves for the same generator, draw from no other one, "
        "leave z and t as they were, do without the image that z was made from, and take batches of any size, a very "
        "small t and float16."
    )
    rows = [[*tables.names(results, ranked), Cell("; ".join(words))] for ranked, words in found]
    left = ("estimator", "what is unusual")
    table = [Table(["#", *left], rows, left)] if found else []
    others = [Paragraph(usual)] if len(found) < len(entries) else []
    return [Heading(3, "Behaviour"), *table, *others]


def notes(results: Results, entries: Sequence[Ranked]) -> list[Block]:
    """Return the section on what entries compute, of those that say it."""
    rows = [[*tables.names(results, r), Cell(r.entry.facts["note"])] for r in entries if r.entry.facts["note"]]
    left = ("estimator", "what it computes")
    return [Heading(3, "What they compute"), Table(["#", *left], rows, left)] if rows else []


def settings(results: Results, entries: Sequence[Ranked]) -> list[Block]:
    """Return all settings of each entry, with the command that measures it again."""
    return [Heading(3, "Settings"), *(Details(f"{r.number} {r.entry.name}", _settings(r.entry)) for r in entries)]


def _settings(entry: Entry) -> list[Block]:
    facts = entry.facts
    when, revision = facts["date"] or "an unknown date", facts["lit_knn"] or "of an unknown revision"
    how = f"Measured on {when} with lit_knn {revision}. Cases of images that are not in the package also need --data."
    again = command(entry)
    try:
        text = json.dumps(json.loads(facts["settings"]), indent=2, ensure_ascii=False)
    except ValueError:
        text = facts["settings"]
    return [Paragraph(how), *([Code(again)] if again else []), Code(text)]


def _machine_name(results: Results, place: int) -> str:
    entry = next(entry for entry in results.entries if entry.machine == results.machines[place])
    return f"Machine {tables.letter(results, entry)}:" if len(results.machines) > 1 else "Machine:"


def _machine(results: Results, machine: tuple[str, ...]) -> str:
    cpu, cores, memory, threads = machine
    own = [entry for entry in results.entries if entry.machine == machine]
    times = [ms for entry in own for t in entry.rows if (ms := entry.value(t, "reference_ms")) == ms]
    took = (
        f"; the reference estimator takes {numbers.ratio(min(times))} to {numbers.ratio(max(times))} ms per z"
        if times
        else ""
    )
    return f"{cpu or 'unknown CPU'}, {cores} cores, {memory} GB, threads used: {threads}{took}"


def _all(results: Results, column: str) -> str:
    return ", ".join(results.distinct(column)) or "unknown"


def _commas(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else text
