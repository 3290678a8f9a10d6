"""The tables of a page: entries down, noise levels across, all in the order of the ranking."""

import math
from collections.abc import Callable, Sequence

from lit_knn.referee.page import numbers
from lit_knn.referee.page.blocks import Cell, Table
from lit_knn.referee.page.front import ROUNDING, Ranked
from lit_knn.referee.page.results import Entry, Results

# A square that may be negative is told from 0 by two standard errors, other means by one.
SURE = {"bias_sq": 2.0}
LEFT = ("estimator",)


def ranking(results: Results, entries: Sequence[Ranked]) -> Table:
    """Make the main table: place, time, set-up, memory, and the error ratio at each noise level."""
    levels = results.levels
    header = ["#", "estimator", "front", "time", "worst error", "set-up", "memory", *map(_at, levels)]
    rows = []
    for ranked in entries:
        entry = ranked.entry
        head = [*names(results, ranked), Cell(str(ranked.place or numbers.MISSING), strong=ranked.place == 1)]
        memory = entry.mean("peak_mib")
        costs = [
            time(ranked.time, entry.mean("time_ratio_low"), entry.mean("time_ratio_high")),
            Cell(numbers.ratio(ranked.error), key=ranked.error),
            Cell(numbers.seconds(setup := entry.mean("setup_seconds")), key=setup),
            Cell(numbers.whole(memory) + (" MiB" if memory == memory else ""), key=memory),
        ]
        shares = [measured(entry, t, "mse_ratio", numbers.ratio, t in ranked.front) for t in levels]
        rows.append([*head, *costs, *shares])
    return Table(header, rows, LEFT)


def error_table(results: Results, entries: Sequence[Ranked], column: str) -> Table:
    """Make a table of a mean with its standard error, such as `mse`, at each noise level."""
    return _by_level(results, entries, lambda entry, t: measured(entry, t, column))


def time_table(results: Results, entries: Sequence[Ranked]) -> Table:
    """Make the table of time ratios at each noise level, and of the milliseconds for each latent on its own machine."""
    table = _by_level(
        results,
        entries,
        lambda entry, t: time(*(entry.value(t, f"time_ratio{end}") for end in ("", "_low", "_high"))),
    )
    rows = [
        [*row, *(Cell(numbers.ratio(ms), key=ms) for ms in (ranked.entry.mean("ms"), ranked.entry.mean("ms_one")))]
        for row, ranked in zip(table.rows, entries, strict=True)
    ]
    return Table([*table.header, "ms per z", "ms, one alone"], rows, LEFT)


def certificate_table(results: Results, entries: Sequence[Ranked]) -> Table | None:
    """Make the table of certified over actual error; None if no entry certifies its error."""
    certified = [ranked for ranked in entries if not math.isnan(ranked.entry.mean("certified_share"))]

    def cell(entry: Entry, t: float) -> Cell:
        share, spread = entry.value(t, "certified_share"), entry.value(t, "certified_spread")
        if entry.value(t, "mse") < ROUNDING:
            return Cell("rounding", key=math.nan)
        return Cell(numbers.ratio(share), "" if math.isnan(spread) else f"spread {numbers.ratio(spread)}", key=share)

    return _by_level(results, certified, cell) if certified else None


def names(results: Results, ranked: Ranked) -> list[Cell]:
    """Make the first cells of a row: the entry's number and its name, with origin and machine where they matter."""
    entry = ranked.entry
    origin = "" if entry.facts["origin"] == "lit_knn" else entry.facts["origin"]
    machine = f"machine {letter(results, entry)}" if len(results.machines) > 1 else ""
    small = ", ".join(filter(None, (origin, machine)))
    return [Cell(str(ranked.number), key=ranked.number), Cell(entry.name, small)]


def letter(results: Results, entry: Entry) -> str:
    """Name the entry's machine on this page: A, B, and so on, and by numbers after Z."""
    place = results.machines.index(entry.machine)
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def measured(
    entry: Entry, t: float, column: str, tell: Callable[[float], str] = numbers.error, strong: bool = False
) -> Cell:
    """Make the cell of a mean with its standard error, or of its upper limit if it cannot be told from 0."""
    value, standard_error = entry.value(t, column), entry.value(t, f"{column}_se")
    if math.isnan(value):
        return Cell(numbers.MISSING, key=math.nan)
    limit = numbers.upper_limit(value, standard_error, SURE.get(column, 1.0))
    if limit is not None:
        return Cell(f"< {tell(limit)}", strong=strong, key=limit)
    known = standard_error > 0
    return Cell(tell(value), f"± {tell(standard_error)}" if known else "", strong, key=value)


def time(ratio: float, low: float, high: float) -> Cell:
    """Make the cell of a time ratio with its range over the repeats."""
    spread = "" if math.isnan(low) or math.isnan(high) else f"{numbers.ratio(low)} to {numbers.ratio(high)}"
    return Cell(numbers.ratio(ratio), spread, key=ratio)


def _by_level(results: Results, entries: Sequence[Ranked], cell: Callable[[Entry, float], Cell]) -> Table:
    levels = results.levels
    rows = [[*names(results, ranked), *(cell(ranked.entry, t) for t in levels)] for ranked in entries]
    return Table(["#", "estimator", *map(_at, levels)], rows, LEFT)


def _at(t: float) -> str:
    return f"t = {numbers.level(t)}"
