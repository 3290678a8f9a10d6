"""Pieces of Markdown for GitHub and the site: escaped text, numbers of two digits, cells and code."""

import math
import re

# A backslash takes the meaning from each of these. A name such as lit_knn needs none within the word.
SPECIAL = re.compile(r"[\\`*\[\]<>|~&$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
MISSING = "–"


def escaped(text: str) -> str:
    """Escape a text, so that it shows as it is, in one line."""
    return SPECIAL.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def cell(text: str, small: str = "", strong: bool = False) -> str:
    """Write a cell of a table, with a second line in small letters, such as the standard error."""
    text = f"**{escaped(text)}**" if strong else escaped(text)
    return f"{text}<br><sub>{escaped(small)}</sub>" if small else text


def fenced(text: str) -> str:
    """Write code. Its fence has more backticks than the code itself."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


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


def upper_limit(value: float, standard_error: float, sure: float = 1.0) -> float | None:
    """Return the upper limit of a mean that cannot be told from 0, or None if it can.

    Args:
        value: the mean; an estimate of a square may be negative.
        standard_error: of the mean; NaN if unknown.
        sure: a mean of more standard errors than this is told from 0.
    """
    if math.isnan(standard_error) or value > sure * standard_error or (value == 0 == standard_error):
        return None
    return max(value, 0.0) + 2 * standard_error
