"""The tables of a page: entries down, noise levels across, all in the order of the ranking."""

import math
from collections.abc import Callable, Sequence

from lit_knn.referee.page import numbers
from lit_knn.referee.page.front import ROUNDING, Ranked
from lit_knn.referee.page.markdown import cell, table
from lit_knn.referee.page.results import Entry, Results

# A square that may be negative is told from 0 by two standard errors, other means by one.
SURE = {"bias_sq": 2.0}


def ranking(results: Results, entries: Sequence[Ranked]) -> str:
    """Write the main table: place, time, set-up, memory, and the error ratio at each noise level."""
    rows = []
    for ranked in entries:
        entry = ranked.entry
        memory = entry.mean("peak_mib")
        rows.append(
            [
                *names(results, ranked),
                cell(str(ranked.place or numbers.MISSING), strong=ranked.place == 1),
                time(ranked.time, entry.mean("time_ratio_low"), entry.mean("time_ratio_high")),
                cell(numbers.ratio(ranked.error)),
                cell(numbers.seconds(entry.mean("setup_seconds"))),
                cell(numbers.MISSING if math.isnan(memory) else f"{memory:,.0f} MiB"),
                *(measured(entry, t, "mse_ratio", numbers.ratio, t in ranked.front) for t in results.levels),
            ]
        )
    return table(["#", "estimator", "front", "time", "worst error", "set-up", "memory", *_levels(results)], rows)


def error_table(results: Results, entries: Sequence[Ranked], column: str) -> str:
    """Write a table of a mean with its standard error, such as `mse`, at each noise level."""
    rows = [[*names(results, r), *(measured(r.entry, t, column) for t in results.levels)] for r in entries]
    return table(["#", "estimator", *_levels(results)], rows)


def time_table(results: Results, entries: Sequence[Ranked]) -> str:
    """Write the table of time ratios at each noise level, and of the milliseconds for each latent on its machine."""
    rows = []
    for ranked in entries:
        value = ranked.entry.value
        ratios = [time(*(value(t, f"time_ratio{end}") for end in ("", "_low", "_high"))) for t in results.levels]
        ms = [cell(numbers.ratio(ranked.entry.mean(column))) for column in ("ms", "ms_one")]
        rows.append([*names(results, ranked), *ratios, *ms])
    return table(["#", "estimator", *_levels(results), "ms per z", "ms, one alone"], rows)


def certificate_table(results: Results, entries: Sequence[Ranked]) -> str:
    """Write the table of certified over actual error; empty if no entry certifies its error."""
    certified = [ranked for ranked in entries if not math.isnan(ranked.entry.mean("certified_share"))]
    rows = [[*names(results, r), *(_certificate(r.entry, t) for t in results.levels)] for r in certified]
    return table(["#", "estimator", *_levels(results)], rows) if rows else ""


def _certificate(entry: Entry, t: float) -> str:
    if entry.value(t, "mse") < ROUNDING:
        return cell("rounding")
    spread = entry.value(t, "certified_spread")
    small = "" if math.isnan(spread) else f"spread {numbers.ratio(spread)}"
    return cell(numbers.ratio(entry.value(t, "certified_share")), small)


def names(results: Results, ranked: Ranked) -> list[str]:
    """Write the first cells of a row: the entry's number and its name, with origin and machine where they matter."""
    origin = ranked.entry.facts["origin"]
    machine = f"machine {letter(results, ranked.entry)}" if len(results.machines) > 1 else ""
    small = ", ".join(part for part in (origin, machine) if part not in ("", "lit_knn"))
    return [cell(str(ranked.number)), cell(ranked.entry.name, small)]


def letter(results: Results, entry: Entry) -> str:
    """Name the entry's machine on this page: A, B, and so on, and by numbers after Z."""
    place = results.machines.index(entry.machine)
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def measured(
    entry: Entry, t: float, column: str, form: Callable[[float], str] = numbers.error, strong: bool = False
) -> str:
    """Write the cell of a mean with its standard error, or of its upper limit if it cannot be told from 0."""
    value, standard_error = entry.value(t, column), entry.value(t, f"{column}_se")
    if math.isnan(value):
        return numbers.MISSING
    limit = numbers.upper_limit(value, standard_error, SURE.get(column, 1.0))
    if limit is not None:
        return cell(f"< {form(limit)}", strong=strong)
    return cell(form(value), f"± {form(standard_error)}" if standard_error > 0 else "", strong)


def time(ratio: float, low: float, high: float) -> str:
    """Write the cell of a time ratio with its range over the repeats."""
    known = not (math.isnan(low) or math.isnan(high))
    return cell(numbers.ratio(ratio), f"{numbers.ratio(low)} to {numbers.ratio(high)}" if known else "")


def _levels(results: Results) -> list[str]:
    return [f"t = {t:g}" for t in results.levels]
