"""Pieces of Markdown for GitHub and the site: escaped text, tables and code."""

import re
from collections.abc import Sequence

# A backslash takes the meaning from each of these. A name such as lit_knn needs none within the word.
SPECIAL = re.compile(r"[\\`*\[\]<>|~&$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# Columns of text. The others hold numbers, which are set to the right.
LEFT = ("estimator", "what is unusual", "what it computes")


def escaped(text: str) -> str:
    """Escape a text, so that it shows as it is, in one line."""
    return SPECIAL.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def cell(text: str, small: str = "", strong: bool = False) -> str:
    """Write a cell of a table, with a second line in small letters, such as the standard error."""
    text = f"**{escaped(text)}**" if strong else escaped(text)
    return f"{text}<br><sub>{escaped(small)}</sub>" if small else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table from the texts of its header and the finished cells of its rows."""
    rule = ["---" if name in LEFT else "---:" for name in header]
    return "\n".join(f"| {' | '.join(row)} |" for row in (map(escaped, header), rule, *rows))


def fenced(text: str) -> str:
    """Write code. Its fence has more backticks than the code itself."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
