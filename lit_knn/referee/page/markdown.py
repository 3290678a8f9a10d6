"""Write a page as Markdown for GitHub."""

import re
from collections.abc import Sequence

from lit_knn.referee.page.blocks import Block, Cell, Code, Details, Heading, Items, Paragraph, Picture, Table

# A backslash takes the meaning from each of these. A name such as lit_knn needs none within the word.
SPECIAL = re.compile(r"[\\`*\[\]<>|~&$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def markdown(blocks: Sequence[Block]) -> str:
    """Return the page as text."""
    return "\n\n".join(map(_block, blocks)) + "\n"


def escaped(text: str) -> str:
    """Escape a text, so that it shows as it is, in one line."""
    return SPECIAL.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {escaped(text)}"
        case Paragraph(text):
            return escaped(text)
        case Items(items):
            return "\n".join(f"- **{escaped(name)}** {escaped(text)}" for name, text in items)
        case Table():
            return _table(block)
        case Code(text):
            return _fenced(text)
        case Picture(alt, file, _):
            return f"![{escaped(alt)}]({file})"
        case Details(summary, blocks):
            # Without the empty lines GitHub would not read the inside as Markdown.
            return f"<details>\n<summary>{escaped(summary)}</summary>\n\n{markdown(blocks)}\n</details>"


def _table(table: Table) -> str:
    rule = ["---" if name in table.left else "---:" for name in table.header]
    rows = [[escaped(name) for name in table.header], rule, *([_cell(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(cell: Cell) -> str:
    text = f"**{escaped(cell.text)}**" if cell.strong and cell.text else escaped(cell.text)
    return f"{text}<br><sub>{escaped(cell.small)}</sub>" if cell.small else text


def _fenced(text: str) -> str:
    """Fence code with more backticks than it has itself."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
