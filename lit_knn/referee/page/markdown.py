"""Pieces of Markdown for GitHub and the site: escaped text, numbers of two digits, and tables of entries."""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from lit_knn.referee.page.front import Ranked
from lit_knn.referee.page.results import Results

# A backslash takes the meaning from each of these. A name such as lit_knn needs none within the word.
SPECIAL = re.compile(r"[\\`*\[\]<>|~&$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
MISSING = "–"
# These columns hold text. The others hold numbers, which are set to the right.
TEXTS = ("estimator", "what is unusual", "what it computes")

Entries = Sequence[Ranked]


def escaped(text: str) -> str:
    """Escape a text, so that it shows as it is, in one line."""
    return SPECIAL.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def cell(text: str, small: str = "", strong: bool = False) -> str:
    """Write a cell of a table, with a second line in small letters, such as the standard error."""
    text = f"**{escaped(text)}**" if strong else escaped(text)
    return f"{text}<br><sub>{escaped(small)}</sub>" if small else text


def error(value: float) -> str:
    """Format an error with two digits, as in 2.9e-7."""
    if math.isnan(value):
        return MISSING
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def ratio(value: float) -> str:
    """Format a ratio with two digits, and without an exponent from 0.01 to 999."""
    rounded = float(f"{value:.1e}")
    if not 0.01 <= abs(rounded) < 1000:
        return error(value)
    return f"{rounded:.0f}" if abs(rounded) >= 10 else f"{rounded:#.2g}"


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
    machine = f"machine {results.letter(ranked.entry.machine)}" if len(results.machines) > 1 else ""
    return cell(ranked.entry.name, ", ".join(part for part in (origin, machine) if part not in ("", "lit_knn")))


def error_ratio(ranked: Ranked, t: float) -> str:
    """Write the cell of a ratio of errors with its standard error, or of its upper limit if it may be 0."""
    value, standard_error = ranked.entry.value(t, "mse_ratio"), ranked.entry.value(t, "mse_ratio_se")
    if math.isnan(value):
        return MISSING
    strong = t in ranked.front
    if value <= standard_error and standard_error > 0:
        return cell(f"< {ratio(value + 2 * standard_error)}", strong=strong)
    return cell(ratio(value), f"± {ratio(standard_error)}" if standard_error > 0 else "", strong)


def spread(value: float, low: float, high: float) -> str:
    """Write the cell of a time ratio with its range over the repeats."""
    return cell(ratio(value), f"{ratio(low)} to {ratio(high)}")
